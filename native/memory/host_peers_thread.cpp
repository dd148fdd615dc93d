// The thread of HostPeers: receives messages, sends queued ones, and detects deaths.

#include <cerrno>
#include <ctime>

#include <poll.h>
#include <unistd.h>

#include "memory/host_peers_messages.hpp"
#include "support/clock.hpp"

namespace unisono {

namespace {

constexpr int retry_ms = 20; // after a lack of resources
constexpr int recheck_ms = 200; // for segments that other ranks still need
// How long a closing rank waits until others have received its announcements.
constexpr std::int64_t close_grace_ns = 2'000'000'000;

} // namespace

// What the thread polls: the socket and the process of each rank.
struct HostPeers::Watcher {
  explicit Watcher(HostPeers &host_peers)
      : host_peers_(host_peers), n_(host_peers.sockets_.size()), polled_(2 * n_ + 1) {
    for (std::size_t r = 0; r < n_; ++r) {
      socket(r) = {host_peers.sockets_[r], POLLIN, 0};
      process(r) = {host_peers.pidfds_[r], POLLIN, 0};
    }
    polled_[2 * n_] = {host_peers.wake_, POLLIN, 0};
  }

  void wait() {
    const bool lingers = host_peers_.drop_unwanted();
    const int limit = prepare() ? retry_ms : lingers ? recheck_ms : -1;
    // The kernel accepts no more entries than descriptors are allowed: only open ones.
    now_.clear();
    for (const pollfd &one : polled_)
      if (one.fd >= 0)
        now_.push_back(one);
    if (::poll(now_.data(), now_.size(), limit) < 0 && errno != EINTR)
      look_at_each();
    std::size_t next = 0;
    for (pollfd &one : polled_)
      one.revents = one.fd >= 0 ? now_[next++].revents : short(0);
    std::uint64_t count;
    (void)!::read(host_peers_.wake_, &count, sizeof count);
  }

  void handle_events(std::size_t r) {
    // Messages sent before a death are received before the death is recorded.
    const bool died = process(r).revents != 0;
    const bool speaks =
        open(r) && (died || host_peers_.short_[r] || socket(r).revents != 0);
    const bool ended = speaks && !host_peers_.drain(r);
    if (ended)
      ended_[r] = true;
    if (died) {
      process(r).fd = -1;
      host_peers_.table_->ended[r].store(true, std::memory_order_release);
    }
    if (ended || died)
      host_peers_.mark_dead(r);
    if (host_peers_.sockets_[r] >= 0)
      (void)host_peers_.flush(r);
  }

private:
  pollfd &socket(std::size_t r) { return polled_[2 * r]; }
  pollfd &process(std::size_t r) { return polled_[2 * r + 1]; }
  bool open(std::size_t r) const { return host_peers_.sockets_[r] >= 0 && !ended_[r]; }

  // For a process whose descriptor limit was lowered below what it has open.
  void look_at_each() {
    const timespec pause{0, retry_ms * 1'000'000L};
    ::nanosleep(&pause, nullptr);
    for (pollfd &one : now_)
      if (::poll(&one, 1, 0) <= 0)
        one.revents = 0;
  }

  // Whether something is to be tried again later.
  bool prepare() {
    std::lock_guard lock(host_peers_.sending_);
    bool retry = false;
    for (std::size_t r = 0; r < n_; ++r) {
      const Outgoing &to = host_peers_.outgoing_[r];
      const bool waits = !to.unsent.empty();
      // A socket whose message cannot be received yet would be ready again at once.
      socket(r).fd = open(r) && !host_peers_.short_[r] ? host_peers_.sockets_[r] : -1;
      socket(r).events = waits && !to.later ? POLLIN | POLLOUT : POLLIN;
      retry = retry || host_peers_.short_[r] || (waits && to.later);
    }
    return retry || host_peers_.closed_.load(std::memory_order_acquire);
  }

  HostPeers &host_peers_;
  std::size_t n_;
  std::vector<pollfd> polled_, now_; // of all ranks; what is open
  std::vector<bool> ended_ = std::vector<bool>(n_);
};

void HostPeers::wake() {
  const std::uint64_t one = 1;
  if (wake_ >= 0) // there is a thread
    (void)!::write(wake_, &one, sizeof one);
}

void HostPeers::watch() {
  for (std::size_t r = 0; r < sockets_.size(); ++r)
    if (gone_at_start_[r]) {
      drain(r);
      mark_dead(r);
    }
  Watcher watcher(*this);
  std::int64_t until = 0; // deadline for closing
  while (true) {
    watcher.wait();
    for (std::size_t r = 0; r < sockets_.size(); ++r)
      watcher.handle_events(r);
    if (!closed_.load(std::memory_order_acquire))
      continue;
    if (until == 0)
      until = now_ns() + close_grace_ns;
    if (immediate_.load(std::memory_order_relaxed) || now_ns() >= until || !unsent())
      return;
  }
}

} // namespace unisono
