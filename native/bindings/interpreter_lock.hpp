// Without the interpreter lock, and how to get it back.
//
// A thread that wants the lock back while the interpreter ends is ended by it, which no
// destructor survives; so it waits for the end instead. Communicators are closed a moment
// before that, as the process says goodbye (`process_ends`): whoever is thrown out of a call
// then gives the end some time to come. Not for ever: there may be somebody who joins this
// thread before.

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

// Whether Python has begun to end this process. Its main thread says so.
inline std::atomic<bool> process_ends = false;

class Unlocked {
public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    if (process_ends.load(std::memory_order_acquire) && !on_main_thread())
      await_end();
    while (finalizing())
      ::pause();
    PyEval_RestoreThread(state_);
  }
  Unlocked(const Unlocked &) = delete;
  Unlocked &operator=(const Unlocked &) = delete;

private:
  static void await_end() {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(3);
    while (!finalizing() && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }

  PyThreadState *state_;
};

// Whether a signal's handler has raised; asks the interpreter, so it takes its lock. Handlers
// run on the main thread alone: others need not ask, and so are not at the lock when the
// interpreter begins to end.
inline bool signalled() {
  if (!on_main_thread() || finalizing())
    return false;
  nanobind::gil_scoped_acquire locked;
  return PyErr_CheckSignals() != 0;
}

} // namespace unisono
