// Point-to-point messages with tags.
//
// Every sender owns an outbox, a segment with one ring of bytes per receiver. A message is
// a short header and its bytes, passed through the ring, so its size is not limited, and a
// small one is complete for its sender at once. The receiver reads messages in the order
// they were sent; one without a matching receive is stored as unexpected until a receive
// matches it.
//
// Between hosts each side has its own ring, and the bytes of the sender's ring are sent to
// the receiver's over a stream. There a send completes when all of it has been handed to
// the kernel.

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
class Channels {
public:
  explicit Channels(Comm &comm);
  static constexpr std::size_t any = ~std::size_t(0);

  void submit(const std::shared_ptr<Transfer> &transfer);
  // False if another thread has completed it after all.
  bool cancel(Transfer &transfer);
  Status advance(Transfer &transfer);
  bool drained(std::size_t source);
  // The rank that a message is received from; `any` if that is open yet.
  std::size_t awaited_source(const Transfer &transfer);
  // Releases the outbox, as soon as all messages have been read.
  void close();
  // Makes the streams to and from other hosts.
  void make_streams();
  SendStream &send_stream(std::size_t rank) { return *outboxes_[rank].send_stream; }
  ReceiveStream &receive_stream(std::size_t rank) { return *inboxes_[rank].receive_stream; }
  void poll_fds(const Transfer &transfer, std::vector<pollfd> &into);
  // Sends what abandoned sends have left in their rings, and skips the rest of messages whose
  // receives were abandoned; whether anything remains.
  bool settle_abandoned();
  void abandoned_poll_fds(std::vector<pollfd> &into);

private:
  friend class Transfer;
  struct Unexpected { // a message that arrived before a matching receive
    MessageHeader head;
    GrowingBuffer data; // what has arrived of it
    bool lost = false; // its receive was cancelled; it is read only to be skipped
  };
  struct Inbox {
    ByteRing *ring = nullptr;
    std::shared_ptr<Memory> memory;
    bool open = false; // in the middle of a message
    MessageHeader head{};
    std::size_t filled = 0;
    std::shared_ptr<Transfer> into; // the matching receive, or null: unexpected
    std::list<Unexpected> unexpected;
    std::unique_ptr<ReceiveStream> receive_stream; // from another host
    std::vector<std::byte> own; // then the ring is in here
    std::vector<std::byte> frame; // and filled from here
    std::size_t framed = 0;
    Io ended = Io::blocked; // why nothing more will arrive
    bool abandoned = false; // the rest of a lost message is still to come
  };
  struct Outbox {
    ByteRing *ring = nullptr;
    std::deque<Transfer *> waiting;
    std::unique_ptr<SendStream> send_stream; // to another host
    std::uint64_t shipped = 0; // bytes of the ring that were given to it
    bool truncation_sent = false; // the notice of a truncated message
    bool abandoned = false; // it holds bytes of abandoned sends
  };

  std::function<bool(const HostPeers &)> unread_messages() const;
  bool open_outbox();
  bool open_inbox(std::size_t source);
  Status send(Transfer &transfer);
  bool put(Transfer &transfer, ByteRing *ring);
  void abandon(Transfer &transfer);
  void settle_later(bool &abandoned);

  // Matching messages with receives: channel_receive.cpp.
  Status receive(Transfer &transfer);
  Status failed(Transfer &transfer, FailureKind kind, std::size_t culprit) const;
  std::size_t failing_source(const Transfer &transfer) const;
  bool poll(std::size_t source);
  bool begins(std::size_t source);
  std::size_t store(Inbox &box, std::uint64_t from, std::size_t bytes);
  void end(Inbox &box);
  bool skip_lost(std::size_t source);
  bool has_ended(std::size_t source) const;
  static void drop_incomplete(Inbox &box);
  void begin(std::size_t source, const MessageHeader &head);
  std::shared_ptr<Transfer> match_posted(std::size_t source, std::int64_t tag) const;
  void deliver(Transfer &transfer, std::size_t source, const MessageHeader &head);
  bool match_unexpected(Transfer &transfer, std::size_t source);

  // Streams between the rings of two hosts: channel_streams.cpp.
  bool send_ring(std::size_t to);
  bool all_has_left(const Outbox &box) const;
  void fill_ring(std::size_t source);
  static void end_stream(Inbox &box, Io why);
  Status connection_lost(Transfer &transfer, std::size_t from);

  Comm &comm_;
  std::mutex mutex_;
  std::size_t capacity_;
  std::uint64_t outbox_ = 0; // its segment
  std::vector<Inbox> inboxes_;
  std::vector<Outbox> outboxes_;
  std::vector<std::shared_ptr<Transfer>> posted_; // receives, in the order of the calls
  std::atomic<std::size_t> abandoned_ = 0; // boxes that are
};

// One send or one receive.
class Transfer final : public Task {
public:
  enum class Direction { send, receive };
  Transfer(Comm &comm, Direction direction, std::size_t peer, std::int64_t tag, void *data,
           std::size_t bytes, std::uint64_t type);
  Status advance() override;
  bool depends_on(std::size_t rank) const override;
  std::vector<Need> needs() const override;
  bool crosses_hosts() const override;
  bool poll_fds(std::vector<pollfd> &into) const override;

  std::size_t source() const { return source_; }
  std::uint64_t message_bytes() const { return message_bytes_; }
  Direction direction() const { return direction_; }
  std::size_t peer() const { return peer_; }

private:
  friend class Channels;
  // Whether it matches such a message and has none yet.
  bool wants(std::size_t source, std::int64_t tag) const {
    return !claimed_ && tag_ == tag && (peer_ == source || peer_ == Channels::any);
  }

  Comm &comm_;
  Direction direction_;
  std::size_t peer_;
  std::int64_t tag_;
  std::byte *data_;
  std::size_t bytes_;
  std::uint64_t type_;
  std::size_t done_ = 0;
  std::int64_t lost_since_ = 0; // when its connection was lost
  std::uint64_t end_ = 0; // the position in the ring where it ends, once known
  bool head_sent_ = false;
  bool claimed_ = false; // a message is being received into it
  bool complete_ = false;
  bool size_mismatch_ = false;
  std::size_t source_ = Channels::any;
  std::uint64_t message_bytes_ = 0;
};

} // namespace unisono
