// The mesh's thread: what comes, what goes out late, and who has died.

#include <cerrno>

#include <poll.h>
#include <unistd.h>

#include "clock.hpp"
#include "mesh_messages.hpp"

namespace unisono {

namespace {

constexpr int retry_ms = 20;                     // for what the system is short of
constexpr std::int64_t farewell_ns = 2'000'000'000; // for others to take in what they were sent

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

  // False when there is nothing more to wait with.
  bool wait() {
    const bool retry = prepare();
    if (::poll(polled_.data(), polled_.size(), retry ? retry_ms : -1) < 0 && errno != EINTR)
      return false;
    std::uint64_t count;
    (void)!::read(mesh_.wake_, &count, sizeof count);
    return true;
  }

  void attend(std::size_t r) {
    // What it sent before it died comes first, then the news of its death.
    const bool died = process(r).revents != 0;
    const bool speaks = open(r) && (died || mesh_.short_[r] || socket(r).revents != 0);
    const bool ended = speaks && !mesh_.drain(r);
    if (ended)
      ended_at(r);
    if (died)
      process(r).fd = -1;
    if (ended || died)
      mesh_.bury(r);
    if (mesh_.sockets_[r] >= 0)
      (void)mesh_.flush(r);
  }

private:
  pollfd &socket(std::size_t r) { return polled_[2 * r]; }
  pollfd &process(std::size_t r) { return polled_[2 * r + 1]; }
  bool open(std::size_t r) const { return mesh_.sockets_[r] >= 0 && !ended_[r]; }
  void ended_at(std::size_t r) { ended_[r] = true; }

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
      socket(r).revents = process(r).revents = 0;
      retry = retry || mesh_.short_[r] || (waits && to.later);
    }
    return retry || mesh_.closed_.load(std::memory_order_acquire);
  }

  Mesh &mesh_;
  std::size_t n_;
  std::vector<pollfd> polled_;
  std::vector<bool> ended_ = std::vector<bool>(n_);
};

void Mesh::wake() {
  const std::uint64_t one = 1;
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
  while (watching.wait()) {
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
