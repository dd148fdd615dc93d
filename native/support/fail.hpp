// A failed system call as an exception: Python sees an OSError, or a MemoryError.

#pragma once

#include <cerrno>
#include <system_error>

namespace unisono {

[[noreturn]] inline void fail(const char *what) {
  throw std::system_error(errno, std::generic_category(), what);
}

} // namespace unisono
