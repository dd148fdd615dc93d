// Construction and closing of a lifeline, its announcements, and what a fork does to it.

#include "net/lifeline.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <utility>

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "net/lifeline_log.hpp"
#include "net/lifeline_peer.hpp"
#include "support/clock.hpp"
#include "support/fail.hpp"

namespace unisono {

// A forked child would keep the connections open after the parent's death, and hide it.
void Lifeline::in_child() {
  forked_.store(true, std::memory_order_release);
  for (auto &peer : peers_)
    if (peer && peer->open())
      peer->close_wire();
  ::close(std::exchange(epoll_, -1));
  ::close(std::exchange(wake_, -1));
}

Lifeline::Lifeline(std::size_t rank, std::vector<Connection> connections, Options options,
                   Sink sink)
    : rank_(rank), options_(options), sink_(std::move(sink)),
      states_(connections.size(), RankState::alive), log_(std::make_unique<Log>()) {
  if (rank >= connections.size())
    throw std::invalid_argument("a lifeline: its rank must be below the number of ranks");
  for (std::size_t r = 0; r < connections.size(); ++r) {
    const Wire *wire = connections[r].wire.get();
    if (wire != nullptr && (r == rank || (rank != 0 && r != 0)))
      throw std::invalid_argument("a lifeline: a leaf is connected to rank 0 alone, and "
                                  "no rank to itself");
    if (wire != nullptr && wire->descriptor() < 0)
      throw std::invalid_argument("a lifeline: expected a wire that has a descriptor");
  }
  if (options.beat <= 0 || options.limit <= options.beat)
    throw std::invalid_argument("a lifeline: the limit must be longer than a beat");
  try {
    open(connections);
    const auto no_fork = block_forks();
    register_fork_handler();
    thread_.start("unisono-life", [this] { run(); });
  } catch (...) {
    const auto no_fork = block_forks();
    unregister_fork_handler();
    for (int fd : {epoll_, wake_})
      if (fd >= 0)
        ::close(fd);
    throw;
  }
}

void Lifeline::open(std::vector<Connection> &connections) {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0)
    fail("a lifeline: making a descriptor to wait with");
  epoll_event woken{EPOLLIN, {}};
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &woken) != 0)
    fail("a lifeline: waiting for a wake");
  for (std::size_t r = 0; r < connections.size(); ++r) {
    peers_.emplace_back();
    if (connections[r].wire)
      peers_[r] = std::make_unique<Peer>(r, connections[r], options_, epoll_);
  }
}

Lifeline::~Lifeline() { close(); }

void Lifeline::close() {
  if (closed_.exchange(true))
    return;
  if (forked())
    return;
  const std::uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof one);
  thread_.join();
  const auto no_fork = block_forks();
  unregister_fork_handler();
  ::close(epoll_);
  ::close(wake_);
}

bool Lifeline::announce_dead(std::size_t rank, Cause cause) {
  if (rank >= states_.size() || std::size_t(cause) >= num_causes)
    throw std::invalid_argument("a lifeline: the rank or the cause of a death does not exist");
  return post({.kind = Event::Kind::dead, .rank = std::uint32_t(rank), .cause = cause});
}

bool Lifeline::announce_failure(std::uint64_t comm, std::uint64_t word) {
  return post({.kind = Event::Kind::failure,
               .rank = std::uint32_t(rank_),
               .comm = comm,
               .word = word});
}

bool Lifeline::announce_call(std::uint64_t comm, std::size_t rank, const Note &note) {
  return post({.kind = Event::Kind::called,
               .rank = std::uint32_t(rank),
               .comm = comm,
               .note = std::bit_cast<decltype(Event::note)>(note)});
}

bool Lifeline::announce_close(std::uint64_t comm) {
  return post(
      {.kind = Event::Kind::closed, .rank = std::uint32_t(rank_), .comm = comm});
}

bool Lifeline::announce_wait(std::uint64_t comm, std::uint64_t word, const Note &note) {
  return post({.kind = Event::Kind::waits,
               .rank = std::uint32_t(rank_),
               .comm = comm,
               .word = word,
               .note = std::bit_cast<decltype(Event::note)>(note)});
}

bool Lifeline::post(const Event &event) {
  if (forked() || closed_.load(std::memory_order_acquire))
    return false;
  std::lock_guard lock(mutex_);
  if (closed_.load(std::memory_order_acquire))
    return false;
  inbox_.push_back(event);
  inbox_.back().reporter = std::uint32_t(rank_);
  // Under the lock, so that close() cannot have closed the descriptor meanwhile: the thread
  // takes the lock once more before it ends.
  const std::uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof one);
  return true;
}

std::vector<std::int64_t> Lifeline::silence() const {
  const std::int64_t now = now_ns();
  std::vector<std::int64_t> all(peers_.size(), -1);
  for (std::size_t r = 0; r < peers_.size(); ++r)
    if (peers_[r] && peers_[r]->open())
      all[r] = std::max<std::int64_t>(
          0, (now - peers_[r]->heard.load(std::memory_order_relaxed)) / 1'000'000);
  return all;
}

} // namespace unisono
