// Liveness and control messages between hosts.
//
// The ranks form a star. Rank 0 is the hub, and every other rank, a leaf, has one
// authenticated connection to it. Each side sends a heartbeat every `beat`; a rank without
// any message for `limit` is dead, and one whose connection ends is dead at once, unless it
// had announced that it leaves. A rank sends its events to the hub, and the hub forwards
// them to all others. So every event reaches all other ranks once, in the order in which
// the hub received them.
//
// One thread does all of this. It never calls Python, so a rank that is blocked in Python
// is slow, not dead; it never waits for a peer, so a leaf that does not read harms only
// itself; and it does not allocate, so it continues when memory is short. A stopped process
// is silent: `silence()` shows that before the limit.
//
// A leaf that loses the hub receives no more events.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "net/event.hpp"
#include "net/frame.hpp"
#include "net/wire.hpp"
#include "support/fork.hpp"

namespace unisono {

class Lifeline : ForkAware {
public:
  struct Connection {
    std::unique_ptr<Wire> wire; // null where there is none; has a descriptor
    Key outgoing{}, incoming{};
  };
  struct Options {
    std::uint32_t epoch = 0;
    std::int64_t beat = 1'000'000'000, limit = 10'000'000'000; // ns
  };
  // Called on the lifeline's thread for events of other ranks, not for those announced
  // here. It must not throw, wait or close the lifeline; it may announce.
  using Sink = std::function<void(const Event &)>;

  // One connection per rank: the hub's go to all leaves, a leaf's to rank 0. If this
  // throws, they are closed.
  Lifeline(std::size_t rank, std::vector<Connection> connections, Options options, Sink sink);
  ~Lifeline();
  Lifeline(const Lifeline &) = delete;
  Lifeline &operator=(const Lifeline &) = delete;

  // Announces an event to all others; returns before they have received it. A rank that is
  // declared dead is informed too, and is disconnected from then on. False once this is
  // closed.
  bool announce_dead(std::size_t rank, Cause cause);
  bool announce_failure(std::uint64_t comm, std::uint64_t word);
  bool announce_call(std::uint64_t comm, std::size_t rank, const Note &note);
  bool announce_close(std::uint64_t comm);
  bool announce_wait(std::uint64_t comm, std::uint64_t word, const Note &note);

  // For each rank, ms since its last message; -1 if there is no connection (any more).
  std::vector<std::int64_t> silence() const;
  // In a forked child all connections are closed: they belong to the parent, and must end
  // with it.
  bool forked() const { return forked_.load(std::memory_order_acquire); }
  // Announces that this rank leaves, and ends the thread, within 100 ms.
  void close();

private:
  enum class RankState : std::uint8_t { alive, left, dead };
  struct Peer;  // one connection: lifeline_peer.hpp
  struct Log; // events that are still to be sent: lifeline_log.hpp

  void in_child() override;
  void open(std::vector<Connection> &connections);
  bool post(const Event &event);

  // The thread: lifeline_thread.cpp.
  void run();
  void wait(std::int64_t until);
  void handle_ready(Peer *peer, std::uint32_t events);
  void take_inbox();
  void send_heartbeats();
  void check_silence();
  void close_connections();
  bool finish_close(Peer &peer);

  // Receiving and forwarding events: lifeline_events.cpp.
  void receive(Peer &peer);
  bool read_frames(Peer &peer, std::span<const std::byte> bytes);
  bool is_valid(const Peer &peer, const Event &event) const;
  void record_event(const Event &event, std::size_t source, bool from_peer);
  void end_connection_to(const Event &event);
  void mark_lost(Peer &peer, Cause cause);
  void notify_dead(Peer &peer, const Event &news);
  void append(const Event &event, std::size_t source);
  void send_log();
  void send_log_to(Peer &peer);

  std::size_t rank_;
  Options options_;
  Sink sink_;
  std::vector<std::unique_ptr<Peer>> peers_; // by rank; null if there is none
  std::vector<RankState> states_;
  std::unique_ptr<Log> log_;
  int epoll_ = -1, wake_ = -1;
  std::mutex mutex_;
  std::vector<Event> inbox_, taken_;
  std::atomic<bool> closed_ = false, forked_ = false;
  bool declared_dead_ = false; // by the others, or closing
  Worker thread_;
};

} // namespace unisono
