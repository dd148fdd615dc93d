// Places where a test can make this process die, stop or sleep.
//
// UNISONO_FAILPOINTS="name:hit:action,..." arms them when the core is loaded: at the
// hit-th passage of `name` the action is done once: kill, stop, or sleep=milliseconds.
// Without it a failpoint costs one load and a branch that is never taken.

#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace unisono {

extern std::atomic<bool> failpoints_armed;

void failpoint_passed(const char *name);
void arm_failpoints(const std::string &spec);
std::vector<std::string> failpoint_names();

inline void failpoint(const char *name) {
  if (failpoints_armed.load(std::memory_order_relaxed)) [[unlikely]]
    failpoint_passed(name);
}

} // namespace unisono
