// The mesh's thread: what comes, what goes out late, and who has died.

#include <cerrno>
#include <ctime>

#include <poll.h>
#include <unistd.h>

#include "memory/host_peers_messages.hpp"
#include "support/clock.hpp"

namespace unisono {

namespace {

constexpr int retry_ms = 20;   // for what the system is short of
constexpr int linger_ms = 200; // for what others have not taken
// For others to take in what they were told, when this rank leaves.
constexpr std::int64_t farewell_ns = 2'000'000'000;

} // namespace

// What the thread waits for: of each rank the socket and the process.
struct Mesh::Watching {
  explicit Watching(Mesh &mesh) : mesh_(mesh), n_(mesh.sockets_.size()), polled_(2 * n_ + 1) {
    for (std::size_t r = 0; r < n_; ++r) {
      socket(r) = {mesh.sockets_[r], POLLIN, 0};
      process(r) = {mesh.pidfds_[r], POLLIN, 0};
    }
    polled_[2 * n_] = {mesh.wake_, POLLIN, 0};
  }

  void wait() {
    const bool lingers = mesh_.drop_unwanted();
    const int limit = prepare() ? retry_ms : lingers ? linger_ms : -1;
    // The kernel takes no longer list than descriptors are allowed: only what is open.
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
    (void)!::read(mesh_.wake_, &count, sizeof count);
  }

  void attend(std::size_t r) {
    // What it sent before it died comes first, then the news of its death.
    const bool died = process(r).revents != 0;
    const bool speaks = open(r) && (died || mesh_.short_[r] || socket(r).revents != 0);
    const bool ended = speaks && !mesh_.drain(r);
    if (ended)
      ended_[r] = true;
    if (died) {
      process(r).fd = -1;
      mesh_.hub_->ended[r].store(true, std::memory_order_release);
    }
    if (ended || died)
      mesh_.bury(r);
    if (mesh_.sockets_[r] >= 0)
      (void)mesh_.flush(r);
  }

private:
  pollfd &socket(std::size_t r) { return polled_[2 * r]; }
  pollfd &process(std::size_t r) { return polled_[2 * r + 1]; }
  bool open(std::size_t r) const { return mesh_.sockets_[r] >= 0 && !ended_[r]; }

  // For a process that may no longer have as many descriptors as it has.
  void look_at_each() {
    const timespec pause{0, retry_ms * 1'000'000L};
    ::nanosleep(&pause, nullptr);
    for (pollfd &one : now_)
      if (::poll(&one, 1, 0) <= 0)
        one.revents = 0;
  }

  // Whether something is to be tried again after a while.
  bool prepare() {
    std::lock_guard lock(mesh_.sending_);
    bool retry = false;
    for (std::size_t r = 0; r < n_; ++r) {
      const Outgoing &to = mesh_.outgoing_[r];
      const bool waits = !to.unsent.empty();
      // One whose message waits here would be ready again at once.
      socket(r).fd = open(r) && !mesh_.short_[r] ? mesh_.sockets_[r] : -1;
      socket(r).events = waits && !to.later ? POLLIN | POLLOUT : POLLIN;
      retry = retry || mesh_.short_[r] || (waits && to.later);
    }
    return retry || mesh_.closed_.load(std::memory_order_acquire);
  }

  Mesh &mesh_;
  std::size_t n_;
  std::vector<pollfd> polled_, now_; // of all ranks; what is open
  std::vector<bool> ended_ = std::vector<bool>(n_);
};

void Mesh::wake() {
  const std::uint64_t one = 1;
  if (wake_ >= 0) // there is a thread
    (void)!::write(wake_, &one, sizeof one);
}

void Mesh::watch() {
  for (std::size_t r = 0; r < sockets_.size(); ++r)
    if (gone_[r]) {
      drain(r);
      bury(r);
    }
  Watching watching(*this);
  std::int64_t until = 0; // when the end is waited for no longer
  while (true) {
    watching.wait();
    for (std::size_t r = 0; r < sockets_.size(); ++r)
      watching.attend(r);
    if (!closed_.load(std::memory_order_acquire))
      continue;
    if (until == 0)
      until = now_ns() + farewell_ns;
    if (hurried_.load(std::memory_order_relaxed) || now_ns() >= until || !unsent())
      return;
  }
}

} // namespace unisono
