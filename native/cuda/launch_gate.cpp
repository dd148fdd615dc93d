#include "cuda/launch_gate.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace unisono::cuda {

LaunchGate &LaunchGate::of_process() {
  static auto &gate = *new LaunchGate; // never destroyed: threads may use it until the end
  return gate;
}

void LaunchGate::add(const void *owner, int device, std::function<bool()> is_in_flight) {
  const std::lock_guard only(mutex_);
  owners_[owner] = {device, std::move(is_in_flight)};
}

void LaunchGate::remove(const void *owner) {
  const std::lock_guard only(mutex_);
  owners_.erase(owner);
}

bool LaunchGate::run_if_idle(const std::function<void()> &step, int device) {
  const std::lock_guard only(mutex_);
  const auto is_busy = [device](const auto &entry) {
    const Owner &owner = entry.second;
    return (device == any_device || device == owner.device) && owner.is_in_flight();
  };
  if (std::any_of(owners_.begin(), owners_.end(), is_busy))
    return false;
  step();
  return true;
}

void LaunchGate::run_when_idle(const std::function<void()> &step, int device) {
  while (!run_if_idle(step, device))
    std::this_thread::sleep_for(std::chrono::microseconds(200));
}

} // namespace unisono::cuda
