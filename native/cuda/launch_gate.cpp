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

bool any_may_be_busy() {
  const std::lock_guard lock(gate().mutex);
  const auto &all = gate().launchers;
  return std::any_of(all.begin(), all.end(), std::mem_fn(&Launcher::may_be_busy));
}

// False if a call may be in flight; then nothing is done.
bool run_if_idle(const std::function<void()> &release) {
  const std::unique_lock closed(gate().launching, std::try_to_lock);
  if (!closed || any_may_be_busy())
    return false;
  release();
  return true;
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
  release_later([] {}, [release = std::move(release)] { return run_if_idle(release); });
}

} // namespace unisono::cuda
