// Bindings of outstanding work: a thread that waits for it advances it, without the
// interpreter lock; others can register a hook.

#include "bindings/bind.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/handle.hpp"
#include "bindings/interpreter_lock.hpp"

namespace nb = nanobind;

namespace unisono {

int Work::wait(std::int64_t timeout, bool helps) {
  if (op->pending_now()) {
    bool interrupted = false;
    const std::int64_t begun = comm->trace().on() ? now_ns() : 0;
    {
      GilRelease unlocked;
      interrupted = !wait_unlocked(timeout, helps);
    }
    if (begun != 0 && comm->trace().on())
      note_block(begun);
    if (interrupted)
      throw nb::python_error();
  }
  return int(op->state.load(std::memory_order_acquire));
}

void Work::note_block(std::int64_t begun) {
  Moment &moment = comm->trace().moment();
  moment = {};
  moment.kind = Moment::block;
  moment.begin = begun;
  moment.end = now_ns();
  moment.seq = std::uint32_t(op->seq);
  moment.communicator = std::uint32_t(comm->id());
}

// Advances it while waiting; false if a signal handler has raised.
bool Work::wait_unlocked(std::int64_t timeout, bool helps) {
  Backoff backoff(helps ? comm->wait_policy : WaitPolicy{0, 0}, comm->layout().control(),
                  comm->layout().block(comm->rank()).asleep, comm->oversubscription);
  const std::int64_t begun = now_ns();
  std::int64_t asked = begun;
  bool left;
  while (op->pending_now()) {
    if (helps)
      comm->progress(&left);
    if (!backoff.pause([&] { return !op->pending_now(); }))
      continue;
    const std::int64_t now = now_ns();
    if (timeout >= 0 && now - begun >= timeout) {
      late = comm->missing(*op);
      return true;
    }
    if (now - asked > 30'000'000) {
      asked = now;
      if (signal_raised())
        return false;
    }
  }
  return true;
}

} // namespace unisono

using namespace unisono;

namespace {

// --- for other extension modules

// A hook for a `Work`. 0, or -1 with an error set.
int work_when_done(PyObject *work, void (*call)(void *, int), void *arg) {
  if (!nb::isinstance<Work>(nb::handle(work))) {
    PyErr_SetString(PyExc_TypeError, "work_hooks: expected a Work");
    return -1;
  }
  nb::inst_ptr<Work>(nb::handle(work))->op->when_done(call, arg);
  return 0;
}

// The functions below take a `Work` that one of these has returned.

// As `Task::State`; without the interpreter lock, too.
int work_state(PyObject *work) {
  const Work &w = *nb::inst_ptr<Work>(nb::handle(work));
  return int(w.op->state.load(std::memory_order_acquire));
}

// The state when it has ended; pending in a forked process, where it never ends; -1 with an
// error set if a signal handler has raised.
int work_wait(PyObject *work) {
  Work &w = *nb::inst_ptr<Work>(nb::handle(work));
  if (w.comm->host_peers().forked())
    return work_state(work);
  try {
    return w.wait(-1);
  } catch (nb::python_error &raised) {
    raised.restore();
  }
  return -1;
}

// Whether other ranks may still write to its buffers, though it has ended.
int work_is_written(PyObject *work) {
  const Work &w = *nb::inst_ptr<Work>(nb::handle(work));
  return w.op->state.load(std::memory_order_acquire) == Task::broken &&
         w.comm->zero_copy().has_writers();
}

nb::object work_hooks() {
  static WorkHooks offered{work_when_done, run_planned, submit_planned, begin_message,
                           work_state,     work_wait,   work_is_written};
  return nb::steal(PyCapsule_New(&offered, hooks_name, nullptr));
}

// The send or receive behind it, or null.
const Transfer *transfer_of(const Work &work) {
  return dynamic_cast<const Transfer *>(work.op.get());
}

} // namespace

void bind_work(nb::module_ &m) {
  nb::class_<Work>(m, "Work")
      .def("wait", &Work::wait, nb::arg("timeout"), nb::arg("helps") = true)
      .def("state",
           [](const Work &w) { return int(w.op->state.load(std::memory_order_acquire)); })
      .def("seq", [](const Work &w) { return w.op->seq; })
      .def("awaited",
           [](const Work &w) { return w.op->pending_now() ? w.late : w.op->late_ranks; })
      .def("note", [](const Work &w) { return note_tuple(w.op->record->note); })
      .def("failure", [](const Work &w) { return failure_tuple(w.op->failure); })
      .def("source",
           [](const Work &w) {
             const Transfer *t = transfer_of(w);
             return t == nullptr ? std::int64_t(-1) : std::int64_t(t->source());
           })
      .def("message_bytes", [](const Work &w) {
        const Transfer *t = transfer_of(w);
        return t == nullptr ? 0 : t->message_bytes();
      });
  m.def("work_hooks", &work_hooks);
}
