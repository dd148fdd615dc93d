// How failures come to the host and leave it: what kernels report breaks the communicator,
// and a broken communicator ends the kernels.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>

#include "cuda/deferred_release.hpp"
#include "cuda/device_comm.hpp"
#include "cuda/launch_gate.hpp"

namespace unisono::cuda {

namespace {

constexpr auto watch_period = std::chrono::milliseconds(10);

// A note of another rank's call, with what its summary tells. That rank adds the names.
Note note_of(const device::Summary &summary, std::uint64_t seq) {
  Note note{};
  note.seq = seq;
  note.count = summary.count;
  note.content = summary.content;
  note.root = summary.root;
  note.collective = summary.collective;
  note.dtype = summary.dtype;
  note.op = summary.op;
  return note;
}

} // namespace

void DeviceComm::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    lock.unlock();
    try {
      look();
      acknowledge_closed();
      calls_.look();
      update_segments(most_events, this);
      look_for_freed_memory();
    } catch (const Error &) { // the driver fails: this rank cannot take part any more
      const auto me = std::uint32_t(rank_);
      comm_.abort({FailureKind::connection_lost, me, me, next_call()});
      __atomic_store_n(&host_.host<HostWords>()->abort, 1, __ATOMIC_RELEASE);
    }
    lock.lock();
    wake_.wait_for(lock, watch_period, [this] { return stop_; });
  }
}

void DeviceComm::look() {
  if (host_peers_->forked())
    return;
  report_failure();
  report_deaths();
  const Failure failure = comm_.failure();
  if (failure.kind == FailureKind::none)
    return;
  __atomic_store_n(&host_.host<HostWords>()->abort, 1, __ATOMIC_RELEASE);
  describe_own_call(failure);
  calls_.fail();
}

// The call that has not ended yet, as failures name it.
std::uint32_t DeviceComm::next_call() { return std::uint32_t(calls_.last() + 1) | device_call; }

// What a kernel of this rank has found out.
void DeviceComm::report_failure() {
  const device::FailureSlot &slot = host_.host<HostWords>()->failure;
  if (__atomic_load_n(&slot.state, __ATOMIC_ACQUIRE) == 0 || reported_.exchange(true))
    return;
  const auto me = std::uint32_t(rank_);
  const auto culprit = std::min(slot.rank, std::uint32_t(world_ranks_.size() - 1));
  const auto number = std::uint32_t(slot.call) | device_call;
  const Failure failure{FailureKind(slot.why), culprit, me, number};
  calls_.set_number(slot.done, slot.call);
  if (failure.kind == FailureKind::mismatch)
    comm_.abort_mismatch(failure, note_of(slot.theirs, number), note_of(slot.mine, number));
  else
    comm_.abort(failure);
}

// If the calls of ranks differ, and this is one of those that are named: what it called, with
// the names that the rank that found it cannot know. It may be found more than once at the
// same time, so what is published is looked at again.
void DeviceComm::describe_own_call(const Failure &failure) {
  if (failure.kind != FailureKind::mismatch || (failure.seq & device_call) == 0 ||
      (failure.culprit != rank_ && failure.reporter != rank_))
    return;
  const std::lock_guard only(describing_);
  if (failed_.seq == 0)
    if (const auto note = calls_.note_of(failure.seq & ~device_call)) {
      failed_ = *note;
      failed_.seq = failure.seq;
    }
  if (failed_.seq != 0)
    comm_.describe_differing(failed_);
}

// A rank that has closed is not lost: its kernels have ended, or the kernels of this rank
// see that it will not come (RankWords::closed).
void DeviceComm::report_deaths() {
  for (std::size_t q = 0; q < world_ranks_.size(); ++q)
    if (host_peers_->dead(world_ranks_[q]) &&
        comm_.layout().block(q).closed.load(std::memory_order_acquire) == 0)
      comm_.abort({FailureKind::peer_lost, std::uint32_t(q), std::uint32_t(rank_),
                    next_call()});
}

// Whether other ranks may still have memory of this rank mapped. Those that have failed to make
// their half never say that they have released it: but then this rank has announced nothing.
bool DeviceComm::is_used_by_others() const {
  if (!announced_)
    return false;
  for (std::size_t q = 0; q < world_ranks_.size(); ++q)
    if (q != rank_ && !host_peers_->dead(world_ranks_[q]) &&
        board_[q].released.load(std::memory_order_acquire) == 0)
      return true;
  return false;
}

// Waits until all calls have ended, and tells the other ranks and their kernels that there will
// be no more.
void DeviceComm::wait_for_calls() {
  if (const CurrentDevice current(device_, std::nothrow); current)
    (void)api().cuEventSynchronize(last_);
  try {
    set_closed();
  } catch (const Error &) {
    // The driver fails: kernels of other ranks find out by their timeouts.
  }
  board_[rank_].closed.store(1, std::memory_order_release);
}

void DeviceComm::set_closed() {
  const std::uint64_t closed = 1;
  const std::size_t at = offsetof(device::RankWords, closed);
  if (on_host_)
    __atomic_store_n(reinterpret_cast<std::uint64_t *>(arena_on_host() + at), closed,
                     __ATOMIC_RELEASE);
  else
    arena_.write(at, &closed, sizeof closed);
}

void DeviceComm::stop_watching() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  watcher_.join();
}

void DeviceComm::release(DeviceComm *comm) {
  if (comm->host_peers_->forked())
    return;
  comm->shared_.withdraw();
  const bool is_open = comm->connected_ && !std::exchange(comm->closed_, true);
  if (is_open) { // the communicator behind it may be destroyed next
    __atomic_store_n(&comm->host_.host<HostWords>()->abort, 1, __ATOMIC_RELEASE);
    comm->stop_watching();
  }
  run_later([comm, is_open] {
    if (is_open)
      comm->wait_for_calls();
    release_later([comm] {
      comm->imported_.clear();
      comm->mapped_.clear();
      comm->board_[comm->rank_].released.store(1, std::memory_order_release);
    });
    run_later(
        [comm] {
          LaunchGate::of_process().remove(comm);
          delete comm;
        },
        [comm] {
          const Word &released = comm->board_[comm->rank_].released;
          return released.load(std::memory_order_relaxed) != 0 && !comm->is_used_by_others();
        });
  });
}

} // namespace unisono::cuda
