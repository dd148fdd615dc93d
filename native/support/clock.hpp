// The clock: monotonic nanoseconds, the same for all processes of a host.

#pragma once

#include <cstdint>
#include <ctime>

namespace unisono {

inline std::int64_t now_ns() {
  timespec t;
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return std::int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

} // namespace unisono
