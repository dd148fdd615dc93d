// Without the interpreter lock, and how to get it back.
//
// A thread that wants the lock back while the interpreter ends is ended by it, which no
// destructor survives; so it waits for the end instead. A communicator that is closed
// while it is waited for is a sign that the end may be near.

#pragma once

#include <chrono>
#include <thread>

#include <nanobind/nanobind.h>

#include <unistd.h>

#include "comm.hpp"

namespace unisono {

inline bool finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

class Unlocked {
public:
  explicit Unlocked(const Comm &comm) : comm_(comm), state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    for (int i = 0; comm_.closed() && i < 20; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (finalizing())
        break;
    }
    while (finalizing())
      ::pause();
    PyEval_RestoreThread(state_);
  }
  Unlocked(const Unlocked &) = delete;
  Unlocked &operator=(const Unlocked &) = delete;

private:
  const Comm &comm_;
  PyThreadState *state_;
};

// Whether a signal's handler has raised; asks the interpreter, so it takes its lock.
inline bool signalled() {
  if (finalizing())
    return false;
  nanobind::gil_scoped_acquire locked;
  return PyErr_CheckSignals() != 0;
}

} // namespace unisono
