// Waiting for other ranks: spin, then yield, then sleep.
//
// Spinning is best while the others run on cores of their own; with more ranks than cores a
// rank yields first. A yield that takes long has let another process run for its whole time
// slice: then it is better to sleep, because a woken thread gets the core sooner than one
// that yields. A rank that has waited for long sleeps on its futex in any case. After a
// store that others may wait for, the storing rank wakes sleepers if there are any. That
// check is not ordered after the store, so a wake can be missed; every sleep is therefore
// short, and only time depends on the wake.

#pragma once

#include <atomic>
#include <cstdint>

#include <sched.h>

#include "memory/layout.hpp"
#include "support/clock.hpp"
#include "support/failpoint.hpp"
#include "support/futex.hpp"

namespace unisono {

// How often to spin and to yield before sleeping, and how long a yield may take, in ns, if
// only ranks of this job share the core. Set from Python.
struct WaitPolicy {
  std::uint32_t spins = 2000;
  std::uint32_t yields = 200;
  std::int64_t longest_yield = 500'000;
};

// Whether the cores are shared with other processes: assumed for a while after several long
// yields in short order. A single one may have been due to a busy rank of this job.
class Oversubscription {
public:
  bool detected(std::int64_t now) const {
    return now < until_.load(std::memory_order_relaxed);
  }
  void saw_long_yield(std::int64_t begun, std::int64_t now) {
    const bool again = begun - last_.exchange(now, std::memory_order_relaxed) < soon;
    const std::uint32_t seen = again ? seen_.load(std::memory_order_relaxed) + 1 : 1;
    seen_.store(seen, std::memory_order_relaxed);
    if (seen >= enough)
      until_.store(now + stays, std::memory_order_relaxed);
  }

private:
  static constexpr std::int64_t soon = 70'000'000, stays = 50'000'000;
  static constexpr std::uint32_t enough = 4;
  std::atomic<std::int64_t> until_ = 0, last_ = 0;
  std::atomic<std::uint32_t> seen_ = 0;
};

class Backoff {
public:
  Backoff(WaitPolicy wait_policy, Control &control, std::atomic<std::uint32_t> &asleep,
          Oversubscription &oversubscription)
      : policy_(wait_policy), control_(control), asleep_(asleep),
        oversubscription_(oversubscription) {}

  // Waits briefly; true when it is time to check for failures. `ready` is called once more
  // before `sleep`.
  template <class Ready> bool pause(Ready ready) {
    return pause(ready, [this](std::int64_t ns) { futex_sleep(asleep_, 1, ns); });
  }
  template <class Ready, class Sleep> bool pause(Ready ready, Sleep sleep) {
    ++count_;
    if (count_ <= policy_.spins) {
      relax();
      return count_ % 4096 == 0;
    }
    if (count_ <= policy_.spins + policy_.yields && !oversubscription_.detected(now_ns()))
      return yield();
    asleep_.store(1, std::memory_order_relaxed);
    control_.sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (!ready())
      sleep(sleep_ns_);
    control_.sleepers.fetch_sub(1, std::memory_order_relaxed);
    asleep_.store(0, std::memory_order_relaxed);
    sleep_ns_ = sleep_ns_ < longest_sleep ? 2 * sleep_ns_ : sleep_ns_;
    return true;
  }
  void reset() {
    count_ = 0;
    sleep_ns_ = shortest_sleep;
  }

private:
  bool yield() {
    const std::int64_t before = now_ns();
    failpoint("wait.yield");
    ::sched_yield();
    const std::int64_t now = now_ns();
    if (now - before <= policy_.longest_yield)
      return (count_ - policy_.spins) % 64 == 0;
    oversubscription_.saw_long_yield(before, now);
    return true; // many of these would take seconds
  }

  static constexpr std::int64_t shortest_sleep = 100'000, longest_sleep = 6'400'000;
  WaitPolicy policy_;
  Control &control_;
  std::atomic<std::uint32_t> &asleep_;
  Oversubscription &oversubscription_;
  std::uint32_t count_ = 0;
  std::int64_t sleep_ns_ = shortest_sleep;
};

// Wakes the sleeping ranks, if there are any.
inline void wake_sleepers(const Layout &layout, std::size_t n) {
  if (layout.control().sleepers.load(std::memory_order_relaxed) == 0) [[likely]]
    return;
  for (std::size_t r = 0; r < n; ++r) {
    auto &asleep = layout.block(r).asleep;
    if (asleep.load(std::memory_order_relaxed) != 0) {
      asleep.store(0, std::memory_order_relaxed);
      futex_wake(asleep);
    }
  }
}

} // namespace unisono
