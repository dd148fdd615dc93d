// Keeps calls from being launched while the driver waits for all kernels of a device.
//
// Some functions of the driver wait for the kernels that run, cuIpcCloseMemHandle and cuMemFree
// among them, and meanwhile no thread of the process can launch one. A kernel of a call waits
// for other ranks, which may wait for a call that this process has yet to launch. So what may
// wait is done when no call of the process is in flight, and none is launched meanwhile.

#pragma once

#include <functional>
#include <shared_mutex>

namespace unisono::cuda {

// Who launches calls, and says so before the first and after the last.
class Launcher {
public:
  // Whether a call is in flight, or may be at any time.
  virtual bool may_be_busy() = 0;
  // Whether one is in flight now.
  virtual bool is_busy() = 0;

protected:
  ~Launcher() = default;
};
void add_launcher(Launcher &launcher);
void remove_launcher(Launcher &launcher);

// To be held while a call is launched.
std::shared_lock<std::shared_mutex> pass_launch_gate();

// Calls `release` as release_later does (deferred_release.hpp), when no call is in flight.
void release_when_idle(std::function<void()> release);

// The same when no call is in flight now, for what no call of a graph uses. A graph that
// begins at this very moment is not kept from it. `call` does not throw.
void call_when_idle_now(std::function<void()> call);

} // namespace unisono::cuda
