#include "test/crash_stack.hpp"

#include <array>
#include <csignal>

#include <execinfo.h>
#include <unistd.h>

namespace unisono {

namespace {

constexpr std::array fatal{SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL};
std::array<struct sigaction, fatal.size()> before;
int file = -1;

// Gives the signal back to who had it before; it comes again when this returns.
void handle(int number) {
  std::array<void *, 64> frames;
  const int count = ::backtrace(frames.data(), int(frames.size()));
  ::backtrace_symbols_fd(frames.data(), count, file);
  for (std::size_t i = 0; i < fatal.size(); ++i)
    if (fatal[i] == number)
      ::sigaction(number, &before[i], nullptr);
  ::raise(number); // blocked until this returns, also where a process sent it
}

} // namespace

void write_stack_on_crash(int fd) {
  std::array<void *, 1> first;
  (void)::backtrace(first.data(), 1); // it loads a library at its first use
  file = fd;
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_ONSTACK;
  for (std::size_t i = 0; i < fatal.size(); ++i)
    ::sigaction(fatal[i], &action, &before[i]);
}

} // namespace unisono
