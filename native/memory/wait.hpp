// Waiting for other ranks: spin, then yield, then sleep.
//
// Spinning is best while the others run on cores of their own; where there are more ranks
// than cores the first thing to do is to yield. A yield that takes long has let somebody
// else's process run for its whole slice: then it is better to sleep, because one who is
// woken gets the core sooner than one who yields. A rank that has waited long sleeps on its
// own futex anyway. Whoever stores a word that others may wait for rings if anybody sleeps. That
// look is not ordered after the store, so a ring can be missed; every sleep is therefore
// short, and nothing but time ever depends on the ring.

#pragma once

#include <atomic>
#include <cstdint>

#include <sched.h>

#include "memory/layout.hpp"
#include "support/clock.hpp"
#include "support/futex.hpp"

namespace unisono {

// How long to spin and to yield before sleeping, and how long a yield may take if only ranks
// of ours share the core, in nanoseconds; policy that Python sets.
struct Patience {
  std::uint32_t spins = 2000;
  std::uint32_t yields = 200;
  std::int64_t turn = 500'000;
};

// Whether the cores are shared with processes that are not ours: they are taken to be, for a
// while, when several yields in short order took long. One alone may have been a rank of
// ours that was busy with something else.
class Crowd {
public:
  bool here(std::int64_t now) const { return now < until_.load(std::memory_order_relaxed); }
  void saw_slice(std::int64_t now) {
    const bool again = now - last_.exchange(now, std::memory_order_relaxed) < soon;
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
  Backoff(Patience patience, Control &control, std::atomic<std::uint32_t> &asleep,
          Crowd &crowd)
      : patience_(patience), control_(control), asleep_(asleep), crowd_(crowd) {}

  // Waits a little; true when it is time to look whether something is wrong. `ready` is
  // asked once more before going to sleep, which is done by `sleep`.
  template <class Ready> bool pause(Ready ready) {
    return pause(ready, [this](std::int64_t nap) { futex_sleep(asleep_, 1, nap); });
  }
  template <class Ready, class Sleep> bool pause(Ready ready, Sleep sleep) {
    ++count_;
    if (count_ <= patience_.spins) {
      relax();
      return count_ % 4096 == 0;
    }
    if (count_ <= patience_.spins + patience_.yields && !crowd_.here(now_ns()))
      return yield();
    asleep_.store(1, std::memory_order_relaxed);
    control_.sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (!ready())
      sleep(nap_);
    control_.sleepers.fetch_sub(1, std::memory_order_relaxed);
    asleep_.store(0, std::memory_order_relaxed);
    nap_ = nap_ < longest_nap ? 2 * nap_ : nap_;
    return true;
  }
  void reset() {
    count_ = 0;
    nap_ = shortest_nap;
  }

private:
  bool yield() {
    const std::int64_t before = now_ns();
    ::sched_yield();
    const std::int64_t now = now_ns();
    if (now - before > patience_.turn)
      crowd_.saw_slice(now);
    return (count_ - patience_.spins) % 64 == 0;
  }

  static constexpr std::int64_t shortest_nap = 100'000, longest_nap = 6'400'000;
  Patience patience_;
  Control &control_;
  std::atomic<std::uint32_t> &asleep_;
  Crowd &crowd_;
  std::uint32_t count_ = 0;
  std::int64_t nap_ = shortest_nap;
};

// Wakes the ranks that sleep, if there are any.
inline void ring(const Layout &layout, std::size_t n) {
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
