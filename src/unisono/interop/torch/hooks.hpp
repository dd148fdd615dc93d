// What `unisono._native` offers to other extension modules: one header for the native core
// (native/bindings/bind_work.cpp) and for the modules that are compiled where they are used.

#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace unisono {

struct Message {
  bool sends;
  std::int64_t peer; // -1: any, of a receive
  std::int64_t tag;
  void *data;
  std::size_t bytes;
  int collective, dtype; // their codes
  std::uint64_t count;
  std::int64_t timeout; // ns
};

// The functions take Python's lock to be held, except `state`. The name under which this is
// found changes with it.
struct WorkHooks {
  // Calls `call` when the work has ended. 0, or -1 with an error set.
  int (*when_done)(PyObject *work, void (*call)(void *, int), void *arg);

  // What a blocking call returns; or -1 with an error set. After `written` another rank may
  // still write to the buffers: they must never be released.
  enum : int { general, done, failed, written };
  int (*run_planned)(PyObject *comm, PyObject *plan, const void *input, void *output,
                     std::int64_t timeout);

  // A new reference to a work; or null: with an error set, or without one if Python has to
  // make the call.
  PyObject *(*submit_planned)(PyObject *comm, PyObject *plan, const void *input, void *output,
                              std::int64_t timeout);
  PyObject *(*begin_message)(PyObject *comm, const Message *message);

  enum : int { pending, succeeded, broken };
  int (*state)(PyObject *work);
  // The state; -1 with an error set if a signal handler has raised. Pending in a fork.
  int (*wait)(PyObject *work);
  // Whether other ranks may still write to the buffers of a work that has ended.
  int (*is_written)(PyObject *work);
};

inline constexpr const char hooks_name[] = "unisono.work_hooks.3";
inline const WorkHooks *hooks = nullptr; // as another module has found them

} // namespace unisono
