// Places in the code where a test can make this process die, stop or sleep, or limit how many
// bytes it moves at once.
//
// They exist only in builds with UNISONO_TEST_HOOKS (editable installs); there an unarmed one
// costs a load and a branch that is never taken. In other builds both functions are empty.
// What can be armed, and how: test/failpoint.hpp.

#pragma once

#include <cstddef>

#ifdef UNISONO_TEST_HOOKS
#include <atomic>
#endif

namespace unisono {

#ifdef UNISONO_TEST_HOOKS

extern std::atomic<bool> failpoints_armed;

void failpoint_passed(const char *name);
std::size_t failpoint_allows(const char *name, std::size_t bytes);

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

#else

inline void failpoint(const char *) {}
inline std::size_t allowed(const char *, std::size_t bytes) { return bytes; }

#endif

} // namespace unisono
