// Keeps functions of the driver that wait for kernels apart from collectives in flight.
//
// cuMemFree, cuMemFreeHost, cuMemHostUnregister, cuIpcCloseMemHandle and cuModuleLoadData wait
// for every kernel of the process, and until they return no thread of it can launch (seen with
// driver 580). A kernel of a collective may wait for a rank that is another thread of this
// process and has yet to launch: then both wait, until the call times out. So these functions
// are called only while no collective of this process is in flight, and meanwhile none can be
// launched.

#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>

namespace unisono::cuda {

class LaunchGate {
public:
  static LaunchGate &of_process();

  // To be held while a collective is launched.
  [[nodiscard]] std::shared_lock<std::shared_mutex> launching() {
    return std::shared_lock(mutex_);
  }
  // From now on `owner` is asked whether collectives of it are in flight on a device, while
  // none can be launched. Not from inside a step.
  void add(const void *owner, int device, std::function<bool()> is_in_flight);
  void remove(const void *owner);
  // Runs a step if nothing is in flight on a device, or on any. Whether it did.
  static constexpr int any_device = -1;
  bool run_if_idle(const std::function<void()> &step, int device = any_device);
  // Runs it when nothing is in flight any more; in the meantime collectives can be launched.
  // A step that a collective may need, whose kernels on other devices wait for it, names the
  // device.
  void run_when_idle(const std::function<void()> &step, int device = any_device);

private:
  struct Owner {
    int device;
    std::function<bool()> is_in_flight;
  };
  std::shared_mutex mutex_;
  std::map<const void *, Owner> owners_;
};

} // namespace unisono::cuda
