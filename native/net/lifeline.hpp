// Who lives, across hosts.
//
// The ranks form a star. Rank 0 is the hub, and every other rank, a leaf, has one
// connection to it, on which both sides had proven who they are before it came here. Each
// side says something every `beat`; one of whom nothing was heard for `limit` is dead, and
// one whose connection ends is dead at once, unless it had said goodbye. Whoever learns
// something tells the hub, and the hub tells all others. So every death, every goodbye and
// everything about a communicator is heard by all others, once, in the order in which the
// hub heard it.
//
// One thread does all of it. It never touches Python, so a rank that is stuck there is slow,
// not dead; it never waits for anybody, so a leaf that does not read hurts only itself; and
// it allocates nothing, so it goes on when memory is short. A process that is stopped is
// silent: `silence()` shows it before the limit does.
//
// A leaf that loses the hub, or is left by it, hears no more from anybody.

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
  // Called on the lifeline's thread, for what was heard and not for what was told here. It
  // must not throw, wait or close the lifeline; it may tell.
  using Sink = std::function<void(const Event &)>;

  // One connection for each rank: the hub's go to all leaves, a leaf's to rank 0. If this
  // throws, they are closed.
  Lifeline(std::size_t rank, std::vector<Connection> connections, Options options, Sink sink);
  ~Lifeline();
  Lifeline(const Lifeline &) = delete;
  Lifeline &operator=(const Lifeline &) = delete;

  // Tells all others that a rank is dead, or a verdict; returns before they hear it. One
  // that is not dead hears so too, and is alone from then on. False once this is closed.
  bool tell_dead(std::size_t rank, Cause cause);
  bool tell_verdict(std::uint64_t comm, std::uint64_t word);
  bool tell_called(std::uint64_t comm, std::size_t rank, const Note &note);
  bool tell_closed(std::uint64_t comm);
  bool tell_waits(std::uint64_t comm, std::uint64_t word, const Note &note);

  // For each rank, ms since it was last heard; -1 where there is no connection (any more).
  std::vector<std::int64_t> silence() const;
  // In a child after fork all connections are closed: they are the parent's, and must end
  // when it ends.
  bool forked() const { return forked_.load(std::memory_order_acquire); }
  // Says goodbye and ends the thread, within 100 ms.
  void close();

private:
  enum class Fate : std::uint8_t { living, left, dead };
  struct Peer;  // one connection: lifeline_peer.hpp
  struct Log;   // what was told, until all have been sent it: lifeline_log.hpp

  void in_child() override;
  void open(std::vector<Connection> &connections);
  bool tell(const Event &event);

  // The thread: lifeline_thread.cpp.
  void run();
  void wait(std::int64_t until);
  void attend(Peer *peer, std::uint32_t events);
  void take_inbox();
  void beat();
  void look();
  void farewell();
  bool parted(Peer &peer);

  // What comes in and goes round: lifeline_events.cpp.
  void hear(Peer &peer);
  bool understand(Peer &peer, std::span<const std::byte> bytes);
  bool sound(const Peer &peer, const Event &event) const;
  void learn(const Event &event, std::size_t source, bool is_news);
  void bury(const Event &event);
  void lose(Peer &peer, Cause cause);
  void dismiss(Peer &peer, const Event &news);
  void append(const Event &event, std::size_t source);
  void flood();
  void feed(Peer &peer);

  std::size_t rank_;
  Options options_;
  Sink sink_;
  std::vector<std::unique_ptr<Peer>> peers_; // by rank; null where there is none
  std::vector<Fate> fates_;
  std::unique_ptr<Log> log_;
  int epoll_ = -1, wake_ = -1;
  std::mutex mutex_;
  std::vector<Event> inbox_, taken_;
  std::atomic<bool> closed_ = false, forked_ = false;
  bool alone_ = false; // declared dead by the others
  Worker thread_;
};

} // namespace unisono
