// Messages from one rank to another, with tags.
//
// Every sender owns an outbox, a segment with one ring of bytes per receiver. A message is
// a short header and its bytes, streamed through the ring, so its size is not limited, and
// a small one leaves its sender at once. The receiver takes messages in the order they
// were sent; one that nobody has asked for yet is put aside until somebody does.
//
// Between hosts each end has a ring of its own, and what is put into the one is shipped to
// the other over a stream. A send ends there when all of it has left.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/task.hpp"
#include "memory/host_peers.hpp"
#include "net/stream.hpp"
#include "p2p/byte_ring.hpp"
#include "p2p/growing_buffer.hpp"

namespace unisono {

class Comm;

class Transfer;

// All rings of one rank of a communicator.
class Post {
public:
  explicit Post(Comm &comm);
  static constexpr std::size_t any = ~std::size_t(0);

  void enter(const std::shared_ptr<Transfer> &transfer);
  // False if it is complete after all, by another thread.
  bool withdraw(Transfer &transfer);
  Status advance(Transfer &transfer);
  bool drained(std::size_t source);
  // Gives the outbox back, as soon as all that was sent has been taken.
  void close();
  // Makes room for the streams to and from other hosts.
  void part();
  Outlet &outlet(std::size_t rank) { return *outboxes_[rank].outlet; }
  Inlet &inlet(std::size_t rank) { return *inboxes_[rank].inlet; }
  void interests(const Transfer &transfer, std::vector<pollfd> &into);
  // Sends on what was left behind by sends that were given up; whether anything remains.
  bool ship_abandoned();
  void abandoned_interests(std::vector<pollfd> &into);

private:
  friend class Transfer;
  struct Aside { // a message that came before it was asked for
    MessageHead head;
    Pieces data;       // what has come of it
    bool lost = false; // whoever it was for is gone; read only to be rid of it
  };
  struct Inbox {
    Ring *ring = nullptr;
    std::shared_ptr<Memory> memory;
    bool open = false; // in the middle of a message
    MessageHead head{};
    std::size_t filled = 0;
    std::shared_ptr<Transfer> into; // who gets it, or null: put aside
    std::list<Aside> aside;
    std::unique_ptr<Inlet> inlet; // from another host
    std::vector<std::byte> own;   // then the ring is in here,
    std::vector<std::byte> frame; // and filled from here
    std::size_t framed = 0;
    Io ended = Io::blocked; // why nothing more will come
  };
  struct Outbox {
    Ring *ring = nullptr;
    std::deque<Transfer *> waiting;
    std::unique_ptr<Outlet> outlet; // to another host
    std::uint64_t shipped = 0;      // how much of the ring was given to it
    bool cut_told = false;          // that a message was given up half sent
    bool abandoned = false;         // nobody waits any more for what is still to leave
  };

  std::function<bool(const Mesh &)> untaken() const;
  bool open_outbox();
  bool open_inbox(std::size_t source);
  Status send(Transfer &transfer);
  bool put(Transfer &transfer, Ring *ring);
  void give_up(Transfer &transfer);

  // Who gets what has come: channel_receive.cpp.
  Status receive(Transfer &transfer);
  bool pump(std::size_t source);
  bool begins(std::size_t source);
  std::size_t store(Inbox &box, std::uint64_t from, std::size_t bytes);
  void end(Inbox &box);
  void begin(std::size_t source, const MessageHead &head);
  std::shared_ptr<Transfer> wanted(std::size_t source, std::int64_t tag) const;
  void deliver(Transfer &transfer, std::size_t source, const MessageHead &head);
  bool from_aside(Transfer &transfer, std::size_t source);

  // Streams between the rings of two hosts: channel_streams.cpp.
  bool ship(std::size_t to);
  bool all_has_left(const Outbox &box) const;
  void haul(std::size_t source);
  Status severed(Transfer &transfer, std::size_t from);

  Comm &comm_;
  std::mutex mutex_;
  std::size_t capacity_;
  std::uint64_t outbox_ = 0; // its segment
  std::vector<Inbox> inboxes_;
  std::vector<Outbox> outboxes_;
  std::vector<std::shared_ptr<Transfer>> posted_; // receives, in the order of their calls
  std::atomic<std::size_t> abandoned_ = 0;        // outboxes with something that is
};

// One send or one receive.
class Transfer final : public Task {
public:
  enum class Direction { send, receive };
  Transfer(Comm &comm, Direction direction, std::size_t peer, std::int64_t tag, void *data,
           std::size_t bytes, std::uint64_t type);
  Status advance() override;
  bool hindered_by(std::size_t rank) const override;
  std::vector<Need> needs() const override;
  bool crosses_hosts() const override;
  bool interests(std::vector<pollfd> &into) const override;

  std::size_t source() const { return source_; }
  std::uint64_t message_bytes() const { return message_bytes_; }
  Direction direction() const { return direction_; }
  std::size_t peer() const { return peer_; }

private:
  friend class Post;
  // Whether it asks for a message like this and has none yet.
  bool wants(std::size_t source, std::int64_t tag) const {
    return !claimed_ && tag_ == tag && (peer_ == source || peer_ == Post::any);
  }

  Comm &comm_;
  Direction direction_;
  std::size_t peer_;
  std::int64_t tag_;
  std::byte *data_;
  std::size_t bytes_;
  std::uint64_t type_;
  std::size_t done_ = 0;
  std::int64_t lost_since_ = 0; // its connection ended then
  std::uint64_t end_ = 0; // where in the ring it ends, once it is there
  bool head_sent_ = false;
  bool claimed_ = false;  // a message is being put into it
  bool complete_ = false;
  bool misfit_ = false;
  std::size_t source_ = Post::any;
  std::uint64_t message_bytes_ = 0;
};

} // namespace unisono
