// How a call from Python begins: on its caller's thread if the queue is empty, or else
// queued.
//
// A call on its caller's thread keeps the interpreter lock while it checks a few times for
// the other ranks; if they have not arrived, or if there is much data, it releases the
// lock. All entry points are in one file, so that the compiler can inline the shortest.

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

// With more data than this the interpreter lock is released at once.
constexpr std::size_t brief_bytes = 32768;
constexpr std::uint32_t brief_spins = 1000;

// Raises what a signal handler raised, even if another rank's failure came first; otherwise
// whether the work succeeded.
bool outcome(const Task &op) {
  if (PyErr_Occurred())
    throw nb::python_error();
  return op.state.load(std::memory_order_relaxed) == Task::succeeded;
}

// Advances it until it has ended. A collective's thread is one of `threads` from when it
// waits until the call has succeeded.
bool drive(Comm &comm, Task &op, std::size_t bytes, CallingThreads *threads = nullptr) {
  const bool brief = bytes <= brief_bytes && !comm.host_peers().between_threads();
  const std::uint32_t spins = std::min(brief_spins, comm.wait_policy.spins);
  const bool ended = brief && comm.try_drive(op, spins);
  if (ended && outcome(op))
    return true;
  if (threads != nullptr)
    threads->enter();
  if (ended)
    return false;
  {
    GilRelease unlocked;
    comm.drive(op, comm.wait_policy, signal_raised);
  }
  const bool done = outcome(op);
  if (done && threads != nullptr)
    threads->leave();
  return done;
}

// Completes what `begin_inline` has begun; then calls queued meanwhile may run.
bool drive_inline(Handle &comm, Collective &op, std::size_t bytes) {
  struct End {
    Comm &comm;
    ~End() { comm.end_inline(); }
  } end{comm};
  op.record->site = call_site_here();
  return drive(comm, op, bytes, &comm.calling_threads);
}

// The buffers of a blocking call. If it fails while another rank is writing to them, that
// rank may be stopped there and continue at any time: then they are never released.
class Buffers {
public:
  Buffers(Comm &comm, nb::handle first, nb::handle second = {})
      : comm_(comm), held_{first, second} {}
  ~Buffers() {
    if (done_ || !comm_.zero_copy().has_writers())
      return;
    for (const nb::handle held : held_)
      held.inc_ref(); // never released; the interpreter lock is held here
  }
  Buffers(const Buffers &) = delete;
  Buffers &operator=(const Buffers &) = delete;
  bool release(bool done) { return done_ = done; }

private:
  Comm &comm_;
  nb::handle held_[2];
  bool done_ = false;
};

Work submit_at(std::shared_ptr<Handle> comm, const PlanHolder &holder, const void *input,
               void *output, std::int64_t timeout) {
  const Plan &plan = *holder.plan;
  const bool brief = plan.output_bytes + plan.input_bytes <= brief_bytes;
  auto op = comm->submit(holder.plan, input, output, timeout, call_site_here(), brief);
  return {std::move(comm), std::move(op), {}};
}

Work submit(std::shared_ptr<Handle> comm, const PlanHolder &plan, std::uint64_t input,
            std::uint64_t output, std::int64_t timeout) {
  return submit_at(std::move(comm), plan, reinterpret_cast<const void *>(input),
                   reinterpret_cast<void *>(output), timeout);
}

// Cancels a queued call whose caller was interrupted: its buffers belong to the caller
// again. Releases the interpreter lock, which a thread inside a call may be waiting for.
void give_up(Comm &comm, const Work &work) {
  const auto me = std::uint32_t(comm.rank());
  GilRelease unlocked;
  comm.abort({FailureKind::interrupted, me, me, std::uint32_t(work.op->seq)});
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
  Work work = submit(comm, plan, input, output, timeout); // the queue is not empty
  comm->calling_threads.enter();
  try {
    const bool done = work.wait(-1) == Task::succeeded;
    if (done)
      comm->calling_threads.leave();
    return buffers.release(done);
  } catch (nb::python_error &) {
    give_up(*comm, work);
    throw;
  }
}

// Whether a call may begin without the checks of the general path, which has the words for
// whatever is wrong.
bool usable(const Handle &comm) {
  return !comm.closed() && !comm.host_peers().forked() && !comm.ends_next_call();
}

// A plain call that was made before. 0: not cached, use the general path; 1: done; 2:
// failed.
int quick(Handle &comm, int kind, nb::handle x, nb::handle out, nb::handle op,
          nb::handle root) {
  if (!usable(comm))
    return 0;
  PlanCache::Found found = comm.plan_cache.find(kind, x, out, op, root);
  if (found.plan == nullptr)
    return 0;
  const std::size_t bytes = found.plan->output_bytes + found.plan->input_bytes;
  Collective *task =
      comm.begin_inline(std::move(found.plan), found.input, found.output, comm.timeout);
  if (task == nullptr)
    return 0;
  Buffers buffers(comm, x, out);
  return buffers.release(drive_inline(comm, *task, bytes)) ? 1 : 2;
}

// The same as a C function of Python, which has the cheapest calling convention. What is no
// array of NumPy may be on a device: a function of Python starts calls on those.
PyObject *quick_call(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  if (count != 6 || !PyDict_Check(args[5])) {
    PyErr_SetString(PyExc_TypeError, "quick: expected kind, x, out, op, root, options");
    return nullptr;
  }
  PyObject *const comm = PyTuple_GET_ITEM(self, 0), *const on_device = PyTuple_GET_ITEM(self, 1);
  if (PlanCache::array(args[1]) == nullptr)
    return PyObject_Vectorcall(on_device, args, std::size_t(count), nullptr);
  if (PyDict_GET_SIZE(args[5]) != 0)
    return PyLong_FromLong(0);
  try {
    return PyLong_FromLong(quick(*nb::inst_ptr<Handle>(comm), int(PyLong_AsLong(args[0])),
                                 args[1], args[2], args[3], args[4]));
  } catch (nb::python_error &raised) {
    raised.restore();
  } catch (const std::exception &error) { // no C++ exception may pass through Python
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef quick_method = {"quick", reinterpret_cast<PyCFunction>(
                                         reinterpret_cast<void (*)()>(quick_call)),
                            METH_FASTCALL, "A plain call that was made before."};

nb::object quick_of(nb::handle comm, nb::handle on_device) {
  if (!nb::isinstance<Handle>(comm))
    throw nb::type_error("quick_of: expected a communicator");
  return nb::steal(PyCFunction_New(&quick_method, nb::make_tuple(comm, on_device).ptr()));
}

int run_planned_checked(Handle &comm, const PlanHolder &holder, const void *input, void *output,
                        std::int64_t timeout) {
  if (!usable(comm))
    return WorkHooks::general;
  const std::size_t bytes = holder.plan->output_bytes + holder.plan->input_bytes;
  Collective *task = comm.begin_inline(holder.plan, input, output, timeout);
  if (task == nullptr)
    return WorkHooks::general;
  if (drive_inline(comm, *task, bytes))
    return WorkHooks::done;
  return comm.zero_copy().has_writers() ? WorkHooks::written : WorkHooks::failed;
}

std::shared_ptr<Transfer> enter(Comm &comm, const Message &message, std::uint64_t type,
                                bool queued) {
  Note note{};
  set_note(note, message.collective, message.dtype, 0, int(message.peer), message.count);
  auto op = std::make_shared<Transfer>(
      comm, message.sends ? Transfer::Direction::send : Transfer::Direction::receive,
      message.peer < 0 ? Channels::any : std::size_t(message.peer), message.tag, message.data,
      message.bytes, type);
  op->timeout = message.timeout;
  op->queued = queued;
  comm.record(*op, note, now_ns());
  op->record->peer = std::int32_t(message.peer);
  op->record->tag = std::int32_t(message.tag);
  op->record->site = call_site_here();
  op->record->begun = op->record->created;
  op->record->state.store(Record::started, std::memory_order_relaxed);
  comm.channels().submit(op);
  return op;
}

// Begins it. A short message is attempted at once: if it is done, no other thread has to
// wake for it.
Work begin(std::shared_ptr<Handle> comm, const Message &message, std::uint64_t type) {
  auto op = enter(*comm, message, type, true);
  if (message.bytes > brief_bytes || !comm->try_drive(*op, 0))
    comm->submit(op);
  return {std::move(comm), std::move(op), {}};
}

// A send or a receive.
Work transfer(std::shared_ptr<Handle> comm, bool sends, std::int64_t peer, std::int64_t tag,
              std::uint64_t data, std::size_t bytes, std::uint64_t type, int collective,
              int dtype, std::uint64_t count, std::int64_t timeout, bool async_op) {
  const Message message{sends,      peer,  tag,   reinterpret_cast<void *>(data), bytes,
                        collective, dtype, count, timeout};
  if (async_op)
    return begin(std::move(comm), message, type);
  auto op = enter(*comm, message, type, false);
  drive(*comm, *op, bytes);
  return {comm, op, {}};
}

// Whether a message may begin without the general path, which connects to ranks of other
// hosts and has the words for whatever is wrong.
bool reaches(Handle &comm, const Message &message) {
  const std::int64_t peer = message.peer;
  if (peer >= std::int64_t(comm.size()) || peer == std::int64_t(comm.rank()))
    return false;
  if (!message.sends)
    return peer >= -1;
  return peer >= 0 && (!comm.is_remote(std::size_t(peer)) ||
                       comm.channels().send_stream(std::size_t(peer)).open());
}

// For other extension modules, which take no C++ exceptions: what `call` returns, or `failed`
// with an error set.
template <class Call> auto guarded(Call call, decltype(call()) failed) {
  try {
    return call();
  } catch (nb::python_error &raised) {
    raised.restore();
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return failed;
}

bool refused(PyObject *comm, PyObject *plan, const char *words) {
  if (nb::isinstance<Handle>(nb::handle(comm)) &&
      (plan == nullptr || nb::isinstance<PlanHolder>(nb::handle(plan))))
    return false;
  PyErr_SetString(PyExc_TypeError, words);
  return true;
}

// What was begun, which the communicator keeps track of.
PyObject *begun(Handle &comm, Work &&work) {
  comm.begun_calls.add(work.op);
  return nb::cast(std::move(work)).release().ptr();
}

} // namespace

int unisono::run_planned(PyObject *comm, PyObject *plan, const void *input, void *output,
                         std::int64_t timeout) {
  if (refused(comm, plan, "run_planned: expected a communicator and a plan"))
    return -1;
  return guarded(
      [&] {
        return run_planned_checked(*nb::inst_ptr<Handle>(nb::handle(comm)),
                                   *nb::inst_ptr<PlanHolder>(nb::handle(plan)), input, output,
                                   timeout);
      },
      -1);
}

PyObject *unisono::submit_planned(PyObject *comm, PyObject *plan, const void *input,
                                  void *output, std::int64_t timeout) {
  if (refused(comm, plan, "submit_planned: expected a communicator and a plan"))
    return nullptr;
  return guarded(
      [&]() -> PyObject * {
        auto handle = nb::cast<std::shared_ptr<Handle>>(nb::handle(comm));
        if (!usable(*handle))
          return nullptr;
        const auto &holder = *nb::inst_ptr<PlanHolder>(nb::handle(plan));
        return begun(*handle, submit_at(handle, holder, input, output, timeout));
      },
      nullptr);
}

PyObject *unisono::begin_message(PyObject *comm, const Message *message) {
  if (refused(comm, nullptr, "begin_message: expected a communicator"))
    return nullptr;
  return guarded(
      [&]() -> PyObject * {
        auto handle = nb::cast<std::shared_ptr<Handle>>(nb::handle(comm));
        if (!usable(*handle) || !reaches(*handle, *message))
          return nullptr;
        return begun(*handle, begin(handle, *message, std::uint64_t(message->dtype)));
      },
      nullptr);
}

void bind_calls(nb::module_ &m, nb::class_<Handle> &comm) {
  comm.def("calling_threads", [](const Handle &c) { return c.calling_threads.all(); });
  comm.def("begun_calls", [](std::shared_ptr<Handle> c) {
    nb::list all;
    for (auto &[op, thread] : c->begun_calls.unfinished())
      all.append(nb::make_tuple(Work{c, op, {}}, thread));
    return all;
  }, nb::sig("def begun_calls(self) -> list[tuple[Work, int]]"));
  comm.def("remember",
           [](Handle &c, int kind, nb::handle x, nb::handle out, nb::handle op,
              nb::handle root, const PlanHolder &plan) {
             c.plan_cache.remember(kind, x, out, op, root, plan.plan);
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
  m.def("quick_of", &quick_of, nb::arg("comm"), nb::arg("on_device"));
  m.def("learn_arrays", &PlanCache::learn, nb::arg("type"), nb::arg("probe"),
        nb::arg("data"), nb::arg("shape"));
  m.def("array_address", [](nb::handle x) { // 0: not an array, or its layout is not known
    const ArrayHead *a = PlanCache::array(x);
    return a == nullptr ? std::uintptr_t(0) : reinterpret_cast<std::uintptr_t>(a->data);
  }, nb::arg("x"));
}
