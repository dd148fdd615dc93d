// Places where a test can make this process die, stop or sleep, or cut what it sends.
//
// UNISONO_FAILPOINTS="name:hit:action,..." arms them when the core is loaded: at the
// hit-th passage of `name` the action is done once, or at every passage if hit is *:
//
//   kill, stop        this process
//   sleep=MS          so many milliseconds
//   jitter=US         by chance up to so many microseconds, at one passage of eight
//   short=BYTES       where bytes move: at most so many, and none at every second try or so
//   cut=SEED          the same with numbers from a seed, mostly small ones
//
// Without it a failpoint costs one load and a branch that is never taken.

#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

namespace unisono {

extern std::atomic<bool> failpoints_armed;

void failpoint_passed(const char *name);
std::size_t failpoint_allows(const char *name, std::size_t bytes);
void arm_failpoints(const std::string &spec);
std::vector<std::string> failpoint_names();
std::vector<std::string> cut_names(); // where bytes move

inline void failpoint(const char *name) {
  if (failpoints_armed.load(std::memory_order_relaxed)) [[unlikely]]
    failpoint_passed(name);
}

// How many of `bytes` may be moved here at once; 0 if none may, as if the socket were not
// ready.
inline std::size_t allowed(const char *name, std::size_t bytes) {
  if (failpoints_armed.load(std::memory_order_relaxed)) [[unlikely]]
    return failpoint_allows(name, bytes);
  return bytes;
}

} // namespace unisono
