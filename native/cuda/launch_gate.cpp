#include "cuda/launch_gate.hpp"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/deferred_release.hpp"

namespace unisono::cuda {

namespace {

struct Gate {
  std::shared_mutex launching; // held by all who launch, or by who keeps them from it
  std::mutex mutex;            // of `launchers`
  std::vector<Launcher *> launchers;
};

Gate &gate() {
  static auto &made = *new Gate; // never destroyed: a thread that never ends uses it
  return made;
}

using Question = bool (Launcher::*)();

bool any_is(Question busy) {
  const std::lock_guard lock(gate().mutex);
  const auto &all = gate().launchers;
  return std::any_of(all.begin(), all.end(), std::mem_fn(busy));
}

// False if a call is in flight; then nothing is done.
bool run_unless(Question busy, const std::function<void()> &call) {
  const std::unique_lock closed(gate().launching, std::try_to_lock);
  if (!closed || any_is(busy))
    return false;
  call();
  return true;
}

// Calls that are made together, when it is possible.
class Delayed {
public:
  // Whether it is the first one.
  bool add(std::function<void()> call) {
    const std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
    return calls_.size() == 1;
  }
  void run_all() {
    std::vector<std::function<void()>> all;
    {
      const std::lock_guard lock(mutex_);
      all.swap(calls_);
    }
    for (const auto &call : all)
      call();
  }

private:
  std::mutex mutex_;
  std::vector<std::function<void()>> calls_;
};

Delayed &delayed() {
  static auto &made = *new Delayed; // never destroyed, as the gate
  return made;
}

} // namespace

void add_launcher(Launcher &launcher) {
  const std::lock_guard lock(gate().mutex);
  gate().launchers.push_back(&launcher);
}

void remove_launcher(Launcher &launcher) {
  const std::lock_guard lock(gate().mutex);
  std::erase(gate().launchers, &launcher);
}

std::shared_lock<std::shared_mutex> pass_launch_gate() {
  return std::shared_lock(gate().launching);
}

void release_when_idle(std::function<void()> release) {
  release_later([] {}, [release = std::move(release)] {
    return run_unless(&Launcher::may_be_busy, release);
  });
}

void call_when_idle_now(std::function<void()> call) {
  if (!delayed().add(std::move(call)))
    return;
  release_later([] {}, [] {
    return run_unless(&Launcher::is_busy, [] { delayed().run_all(); });
  });
}

} // namespace unisono::cuda
