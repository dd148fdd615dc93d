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

void LaunchGate::add(const void *owner, std::function<bool()> is_in_flight) {
  const std::lock_guard only(mutex_);
  owners_[owner] = std::move(is_in_flight);
}

void LaunchGate::remove(const void *owner) {
  const std::lock_guard only(mutex_);
  owners_.erase(owner);
}

bool LaunchGate::run_if_idle(const std::function<void()> &step) {
  const std::lock_guard only(mutex_);
  if (std::any_of(owners_.begin(), owners_.end(), [](auto &owner) { return owner.second(); }))
    return false;
  step();
  return true;
}

void LaunchGate::run_when_idle(const std::function<void()> &step) {
  while (!run_if_idle(step))
    std::this_thread::sleep_for(std::chrono::microseconds(200));
}

} // namespace unisono::cuda
