// Releasing and reacquiring the interpreter lock.
//
// A thread that reacquires the lock while the interpreter finalizes is terminated, and
// destructors cannot run; so it waits for the end instead. Communicators are closed just
// before that (`process_exiting`): a thread whose call is aborted then waits for the end
// for a limited time, because another thread may join it before.

#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include <nanobind/nanobind.h>

#include <sys/syscall.h>
#include <unistd.h>

namespace unisono {

inline bool finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// By number: glibc has gettid() since 2.30, and wheels are built with 2.28.
inline bool on_main_thread() { return ::syscall(SYS_gettid) == ::getpid(); }

// Whether Python has begun to end this process; set by its main thread.
inline std::atomic<bool> process_exiting = false;

class GilRelease {
public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    if (process_exiting.load(std::memory_order_acquire) && !on_main_thread())
      await_end();
    while (finalizing())
      ::pause();
    PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease &) = delete;
  GilRelease &operator=(const GilRelease &) = delete;

private:
  static void await_end() {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(3);
    while (!finalizing() && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }

  PyThreadState *state_;
};

// Whether a signal handler has raised; takes the interpreter lock. Handlers run on the main
// thread only: other threads do not check, and so do not wait for the lock while the
// interpreter finalizes.
inline bool signal_raised() {
  if (!on_main_thread() || finalizing())
    return false;
  nanobind::gil_scoped_acquire locked;
  return PyErr_CheckSignals() != 0;
}

} // namespace unisono
