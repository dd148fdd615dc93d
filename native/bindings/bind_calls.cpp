// How a call from Python begins: on its caller's thread if nothing stands before it, or
// queued behind what does.
//
// A call on its caller's thread keeps the interpreter lock for as long as it takes to look
// a few times whether the others are there; if they are not, or if there is much to move,
// the lock is let go. All ways in stand in one file, so that the shortest is not split.

#include "bindings/bind.hpp"

#include <algorithm>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings/call_sites.hpp"
#include "bindings/handle.hpp"
#include "bindings/interpreter_lock.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

// Beyond this much data the interpreter lock is given up at once.
constexpr std::size_t brief_bytes = 32768;
constexpr std::uint32_t brief_spins = 1000;

// Raises what a signal's handler raised, even if another rank's failure came first;
// otherwise whether the work was done.
bool outcome(const Task &op) {
  if (PyErr_Occurred())
    throw nb::python_error();
  return op.state.load(std::memory_order_relaxed) == Task::succeeded;
}

bool drive(Comm &comm, Task &op, std::size_t bytes) {
  const bool brief = bytes <= brief_bytes && !comm.mesh().between_threads();
  const std::uint32_t spins = std::min(brief_spins, comm.patience.spins);
  if (brief && comm.try_drive(op, spins))
    return outcome(op);
  {
    Unlocked unlocked;
    comm.drive(op, comm.patience, signalled);
  }
  return outcome(op);
}

// To its end, what `begin_inline` has begun; then those may go on who came meanwhile.
bool drive_inline(Comm &comm, Collective &op, std::size_t bytes) {
  struct End {
    Comm &comm;
    ~End() { comm.end_inline(); }
  } end{comm};
  op.record->site = site_here();
  return drive(comm, op, bytes);
}

// The buffers of a blocking call. If it fails, in whatever way, while another rank is in
// the middle of writing to them, that rank may be stopped there and write on at any time
// later: so they are never let go.
class Buffers {
public:
  Buffers(Comm &comm, nb::handle first, nb::handle second = {})
      : comm_(comm), held_{first, second} {}
  ~Buffers() {
    if (done_ || !comm_.lending().touched())
      return;
    for (const nb::handle held : held_)
      held.inc_ref(); // for good; the interpreter lock is held here
  }
  Buffers(const Buffers &) = delete;
  Buffers &operator=(const Buffers &) = delete;
  bool release(bool done) { return done_ = done; }

private:
  Comm &comm_;
  nb::handle held_[2];
  bool done_ = false;
};

Work submit(std::shared_ptr<Handle> comm, const PlanHolder &plan, std::uint64_t input,
            std::uint64_t output, std::int64_t timeout) {
  return {comm,
          comm->submit(plan.plan, reinterpret_cast<const void *>(input),
                       reinterpret_cast<void *>(output), timeout, site_here()),
          {}};
}

// Takes back a queued call whose caller was interrupted: its buffers are the caller's
// again. Without the interpreter lock, which whoever is in a call may be waiting for.
void give_up(Comm &comm, const Work &work) {
  const auto me = std::uint32_t(comm.rank());
  Unlocked unlocked;
  comm.condemn({Trouble::interrupted, me, me, std::uint32_t(work.op->seq)});
  comm.cancel(work.op);
}

bool run(std::shared_ptr<Handle> comm, const PlanHolder &plan, std::uint64_t input,
         std::uint64_t output, std::int64_t timeout, nb::handle keep) {
  Buffers buffers(*comm, keep);
  const std::size_t bytes = plan.plan->output_bytes + plan.plan->input_bytes;
  Collective *op = comm->begin_inline(plan.plan, reinterpret_cast<const void *>(input),
                                      reinterpret_cast<void *>(output), timeout);
  if (op != nullptr)
    return buffers.release(drive_inline(*comm, *op, bytes));
  Work work = submit(comm, plan, input, output, timeout); // others come first
  try {
    return buffers.release(work.wait(-1) == Task::succeeded);
  } catch (nb::python_error &) {
    give_up(*comm, work);
    throw;
  }
}

// A plain call that was made before. 0: it was not, go the long way; 1: done; 2: failed.
int quick(Handle &comm, int kind, nb::handle x, nb::handle out, nb::handle op,
          nb::handle root) {
  Shortcuts::Found found = comm.shortcuts.find(kind, x, out, op, root);
  if (found.plan == nullptr || comm.closed() || comm.mesh().forked() ||
      comm.verdict().trouble != Trouble::none)
    return 0;
  const std::size_t bytes = found.plan->output_bytes + found.plan->input_bytes;
  Collective *task =
      comm.begin_inline(std::move(found.plan), found.input, found.output, comm.timeout);
  if (task == nullptr)
    return 0;
  Buffers buffers(comm, x, out);
  return buffers.release(drive_inline(comm, *task, bytes)) ? 1 : 2;
}

// The same as a plain C function of Python's, which is called the quickest way there is.
PyObject *quick_call(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  if (count != 5) {
    PyErr_SetString(PyExc_TypeError, "quick: expected kind, x, out, op, root");
    return nullptr;
  }
  try {
    return PyLong_FromLong(quick(*nb::inst_ptr<Handle>(self), int(PyLong_AsLong(args[0])),
                                 args[1], args[2], args[3], args[4]));
  } catch (nb::python_error &raised) {
    raised.restore();
  } catch (const std::exception &error) { // nothing of C++ may leave through Python
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef quick_method = {"quick", reinterpret_cast<PyCFunction>(
                                         reinterpret_cast<void (*)()>(quick_call)),
                            METH_FASTCALL, "A plain call that was made before."};

nb::object quick_of(nb::handle comm) {
  if (!nb::isinstance<Handle>(comm))
    throw nb::type_error("quick_of: expected a communicator");
  return nb::steal(PyCFunction_New(&quick_method, comm.ptr()));
}

std::shared_ptr<Transfer> enter(Comm &comm, bool sends, std::int64_t peer, std::int64_t tag,
                                std::uint64_t data, std::size_t bytes, std::uint64_t type,
                                const Note &note, std::int64_t timeout) {
  auto op = std::make_shared<Transfer>(
      comm, sends ? Transfer::Direction::send : Transfer::Direction::receive,
      peer < 0 ? Post::any : std::size_t(peer), tag, reinterpret_cast<void *>(data), bytes,
      type);
  op->timeout = timeout;
  comm.record(*op, note, now_ns());
  op->record->peer = std::int32_t(peer);
  op->record->tag = std::int32_t(tag);
  op->record->site = site_here();
  op->record->begun = op->record->created;
  op->record->state.store(Record::started, std::memory_order_relaxed);
  comm.post().enter(op);
  return op;
}

// A send or a receive.
Work transfer(std::shared_ptr<Handle> comm, bool sends, std::int64_t peer, std::int64_t tag,
              std::uint64_t data, std::size_t bytes, std::uint64_t type, int collective,
              int dtype, std::uint64_t count, std::int64_t timeout, bool async_op) {
  Note note{};
  set_note(note, collective, dtype, 0, int(peer), count);
  auto op = enter(*comm, sends, peer, tag, data, bytes, type, note, timeout);
  if (async_op)
    comm->submit(op);
  else
    drive(*comm, *op, bytes);
  return {comm, op, {}};
}

} // namespace

void bind_calls(nb::module_ &m, nb::class_<Handle> &comm) {
  comm.def("remember",
           [](Handle &c, int kind, nb::handle x, nb::handle out, nb::handle op,
              nb::handle root, const PlanHolder &plan) {
             c.shortcuts.remember(kind, x, out, op, root, plan.plan);
           },
           nb::arg("kind"), nb::arg("x"), nb::arg("out").none(), nb::arg("op").none(),
           nb::arg("root"), nb::arg("plan"))
      .def("run", &run, nb::arg("plan"), nb::arg("input"), nb::arg("output"),
           nb::arg("timeout"), nb::arg("keep").none())
      .def("submit", &submit, nb::arg("plan"), nb::arg("input"), nb::arg("output"),
           nb::arg("timeout"))
      .def("transfer", &transfer, nb::arg("sends"), nb::arg("peer"), nb::arg("tag"),
           nb::arg("data"), nb::arg("bytes"), nb::arg("type"), nb::arg("collective"),
           nb::arg("dtype"), nb::arg("count"), nb::arg("timeout"), nb::arg("async_op"));
  m.def("quick_of", &quick_of, nb::arg("comm"));
  m.def("learn_arrays", &Shortcuts::learn, nb::arg("type"), nb::arg("probe"),
        nb::arg("data"), nb::arg("shape"));
  m.def("array_address", [](nb::handle x) { // 0: not an array, or not known how to read one
    const ArrayHead *a = Shortcuts::array(x);
    return a == nullptr ? std::uintptr_t(0) : reinterpret_cast<std::uintptr_t>(a->data);
  });
}
