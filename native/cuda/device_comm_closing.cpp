// How a rank leaves. Kernels of other ranks may still read what it has in its windows after its
// own kernels have ended, and its memory may vanish with its process. So it waits until every
// rank has acknowledged that it has ended the calls in which this rank took part: all ranks
// arrive in a call before one ends it, so those calls have begun everywhere. What a rank calls
// later finds that this one has closed, and is refused.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <thread>
#include <utility>

#include "cuda/device_comm.hpp"

namespace unisono::cuda {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto pause = std::chrono::milliseconds(1);
// If calls have no time limit.
constexpr std::chrono::nanoseconds longest_closing = std::chrono::seconds(60);
// When something has failed the kernels of all ranks end at once, as soon as their watchers see
// it. Who does not answer in this time is taken for lost.
constexpr std::chrono::nanoseconds after_failure = std::chrono::seconds(1);

bool is_set(const Word &word) { return word.load(std::memory_order_acquire) != 0; }

// Whether others can have seen that a block has begun the call after its last one. By what they
// see of it: they may have ended that call, and closed, before anything else of it is stored.
bool has_begun_next(const device::BlockWords &block) {
  const std::uint64_t next = block.calls + 1;
  return std::uint32_t(block.arrivals[next & 1].facts[0][0] >> 32) == std::uint32_t(next);
}

} // namespace

void DeviceComm::close() {
  if (host_peers_->forked())
    return;
  const std::lock_guard only(closing_); // who comes second waits too
  {
    const std::lock_guard lock(launching_);
    if (std::exchange(closed_, true))
      return;
  }
  if (!connected_)
    return;
  wait_for_calls(); // the watcher still runs, so kernels end when something fails
  wait_for_readers();
  stop_watching();
}

void DeviceComm::wait_for_readers() {
  const std::int64_t given = timeout_ns_->load();
  const auto limit = given > 0 ? std::chrono::nanoseconds(given) : longest_closing;
  const auto begun = Clock::now();
  while (has_readers()) {
    const auto waited = Clock::now() - begun;
    const bool failed = comm_.failure().kind != FailureKind::none;
    if (waited > (failed ? std::min(limit, after_failure) : limit))
      return;
    std::this_thread::sleep_for(pause);
  }
}

// Whether a kernel of another process may read memory of this rank. That of ranks in this
// process stays as long as they do.
bool DeviceComm::has_readers() const {
  for (std::size_t q = 0; q < world_ranks_.size(); ++q)
    if (!is_here_[q] && !host_peers_->dead(world_ranks_[q]) && !is_set(board_[q].closed) &&
        !is_set(board_[q].released) && !is_set(board_[q].acknowledged[rank_]))
      return true;
  return false;
}

// Tells ranks that have closed that the calls which they took part in have ended here.
void DeviceComm::acknowledge_closed() {
  if (!find_closed(true))
    return;
  const std::unique_lock only(launching_, std::try_to_lock);
  if (!only || !is_quiet())
    return;
  for (std::size_t q = 0; q < world_ranks_.size(); ++q)
    if (is_set(board_[q].closed))
      board_[rank_].acknowledged[q].store(1, std::memory_order_release);
}

// Another rank that has closed; only those that are not acknowledged, if that is asked for.
std::optional<std::size_t> DeviceComm::find_closed(bool unacknowledged) const {
  for (std::size_t q = 0; q < world_ranks_.size(); ++q)
    if (q != rank_ && is_set(board_[q].closed) &&
        !(unacknowledged && is_set(board_[rank_].acknowledged[q])))
      return q;
  return {};
}

// Whether no kernel of this rank runs a call; nothing is launched meanwhile, except graphs. If
// the driver fails, none runs.
bool DeviceComm::is_quiet() {
  const CurrentDevice current(device_, std::nothrow);
  return !current ||
         (api().cuEventQuery(last_) != not_ready && !(is_captured_ && is_in_a_call()));
}

// Whether a block of this rank has begun a call and not ended it, by its words: calls of graphs
// leave no other trace that tells of all blocks.
bool DeviceComm::is_in_a_call() const {
  const auto words = std::make_unique<device::RankWords>();
  try {
    read_words(*words);
  } catch (const Error &) {
    return false;
  }
  return std::any_of(std::begin(words->blocks), std::end(words->blocks), has_begun_next);
}

void DeviceComm::read_words(device::RankWords &words) const {
  if (on_host_)
    std::memcpy(&words, arena_on_host(), sizeof words);
  else
    arena_.read(0, &words, sizeof words);
}

} // namespace unisono::cuda
