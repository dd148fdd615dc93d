#include "net/wire.hpp"

#include <sys/eventfd.h>

#include "support/fail.hpp"

namespace unisono {

pollfd ready_now() {
  // Never read, so always readable; one for the process and its forks.
  static const int fd = [] {
    const int made = ::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
    if (made < 0)
      fail("a descriptor that is always ready");
    return made;
  }();
  return {fd, POLLIN, 0};
}

} // namespace unisono
