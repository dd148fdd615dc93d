// The Python face of the engine: numbers and addresses in, a verdict out.
//
// Nothing here decides anything. A call begins on the interpreter's thread and keeps the
// interpreter lock for as long as it takes to look a few times whether the others are
// there; if they are not, or if there is much to move, the lock is let go.

#include "bind.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>

#include "comm.hpp"
#include "failpoint.hpp"
#include "lifeline.hpp"
#include "progress.hpp"
#include "shortcuts.hpp"
#include "sites.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

using Table = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Column = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class Row> std::vector<Row> rows(const Table &table) {
  static_assert(sizeof(Row) % sizeof(std::int32_t) == 0);
  if (table.shape(1) * sizeof(std::int32_t) != sizeof(Row))
    throw nb::value_error("a table of a program has the wrong number of columns");
  std::vector<Row> all(table.shape(0));
  if (!all.empty())
    std::memcpy(all.data(), table.data(), all.size() * sizeof(Row));
  return all;
}

std::vector<std::int64_t> values(const Column &column) {
  return {column.data(), column.data() + column.shape(0)};
}

bool finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// Without the interpreter lock. A thread that wants it back while the interpreter ends is
// ended by it, which no destructor survives; so it waits for the end instead. A
// communicator that is closed while it is waited for is a sign that the end may be near.
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
bool signalled() {
  if (finalizing())
    return false;
  nb::gil_scoped_acquire locked;
  return PyErr_CheckSignals() != 0;
}

using Facts = std::tuple<int, std::uint32_t, std::uint32_t, std::uint64_t>;

Facts facts(Verdict v) { return {int(v.trouble), v.culprit, v.reporter, v.seq}; }

// Raises what a signal's handler raised; otherwise whether the work was done.
bool outcome(const Task &op) {
  if (op.verdict.trouble == Trouble::interrupted && PyErr_Occurred())
    throw nb::python_error();
  return op.state.load(std::memory_order_relaxed) == Task::succeeded;
}

// A communicator as Python holds it.
struct Handle : Comm {
  using Comm::Comm;
  Shortcuts shortcuts;
  std::int64_t timeout = 0;
};

struct Work {
  std::shared_ptr<Comm> comm;
  std::shared_ptr<Task> op;
  std::vector<std::size_t> late; // who was awaited when a wait for it ran out

  // 0: still at it, 1: done, 2: failed.
  // One who does not help leaves it to the progress thread, and sleeps.
  int wait(std::int64_t timeout, bool helps = true) {
    if (op->pending_now()) {
      bool interrupted = false;
      const std::int64_t begun = comm->trace().on() ? now_ns() : 0;
      {
        Unlocked unlocked(*comm);
        interrupted = !wait_unlocked(timeout, helps);
      }
      if (begun != 0 && comm->trace().on())
        note_block(begun);
      if (interrupted)
        throw nb::python_error();
    }
    return int(op->state.load(std::memory_order_acquire));
  }

private:
  void note_block(std::int64_t begun) {
    Moment &moment = comm->trace().moment();
    moment = {};
    moment.kind = Moment::block;
    moment.begin = begun;
    moment.end = now_ns();
    moment.seq = std::uint32_t(op->seq);
    moment.communicator = std::uint32_t(comm->id());
  }
  // Helps along while it waits; false if a signal's handler has raised.
  bool wait_unlocked(std::int64_t timeout, bool helps) {
    Backoff backoff(helps ? comm->patience : Patience{0, 0}, comm->layout().control(),
                    comm->layout().block(comm->rank()).asleep, comm->crowd);
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
        if (signalled())
          return false;
      }
    }
    return true;
  }
};

// For other extension modules: a hook for a `Work` of ours. 0, or -1 with an error set.
int work_when_done(PyObject *work, void (*call)(void *, int), void *arg) {
  if (!nb::isinstance<Work>(nb::handle(work))) {
    PyErr_SetString(PyExc_TypeError, "work_hooks: expected a Work");
    return -1;
  }
  nb::inst_ptr<Work>(nb::handle(work))->op->when_done(call, arg);
  return 0;
}

struct WorkHooks {
  int (*when_done)(PyObject *work, void (*call)(void *, int), void *arg);
};

// The name of the capsule changes with the struct.
nb::object work_hooks() {
  static WorkHooks hooks{work_when_done};
  return nb::steal(PyCapsule_New(&hooks, "unisono.work_hooks.1", nullptr));
}

// Beyond this much data the interpreter lock is given up at once.
constexpr std::size_t brief_bytes = 32768;
constexpr std::uint32_t brief_spins = 1000;

bool drive(Comm &comm, Task &op, std::size_t bytes) {
  const bool brief = bytes <= brief_bytes && !comm.mesh().between_threads();
  const std::uint32_t spins = std::min(brief_spins, comm.patience.spins);
  if (brief && comm.try_drive(op, spins))
    return outcome(op);
  {
    Unlocked unlocked(comm);
    comm.drive(op, comm.patience, signalled);
  }
  return outcome(op);
}

std::shared_ptr<Task> begin_async(Comm &comm, std::shared_ptr<Plan> plan, std::uint64_t input,
                                std::uint64_t output, std::int64_t timeout) {
  return comm.submit(std::move(plan), reinterpret_cast<const void *>(input),
                     reinterpret_cast<void *>(output), timeout, site_here());
}

bool run(std::shared_ptr<Handle> comm, std::shared_ptr<Plan> plan, std::uint64_t input,
         std::uint64_t output, std::int64_t timeout) {
  Collective *op = comm->begin_inline(*plan, reinterpret_cast<const void *>(input),
                                      reinterpret_cast<void *>(output), timeout);
  if (op != nullptr)
    op->record->site = site_here();
  if (op == nullptr) { // others come first
    Work work{comm, begin_async(*comm, plan, input, output, timeout), {}};
    try {
      return work.wait(-1) == Task::succeeded;
    } catch (nb::python_error &) { // interrupted, and the buffers are the caller's again
      const auto me = std::uint32_t(comm->rank());
      comm->condemn({Trouble::interrupted, me, me, std::uint32_t(work.op->seq)});
      comm->cancel(work.op);
      throw;
    }
  }
  struct End {
    Comm &comm;
    ~End() { comm.end_inline(); }
  } end{*comm};
  return drive(*comm, *op, plan->output_bytes + plan->input_bytes);
}

// A plain call that was made before. 0: it was not, go the long way; 1: done; 2: failed.
int quick(Handle &comm, int kind, nb::handle x, nb::handle out, nb::handle op,
          nb::handle root) {
  const Shortcuts::Found found = comm.shortcuts.find(kind, x, out, op, root);
  if (found.plan == nullptr || comm.closed() || comm.mesh().forked() ||
      comm.verdict().trouble != Trouble::none)
    return 0;
  Collective *task = comm.begin_inline(*found.plan, found.input, found.output, comm.timeout);
  if (task == nullptr)
    return 0;
  task->record->site = site_here();
  struct End {
    Comm &comm;
    ~End() { comm.end_inline(); }
  } end{comm};
  const std::size_t bytes = found.plan->output_bytes + found.plan->input_bytes;
  return drive(comm, *task, bytes) ? 1 : 2;
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
    return nullptr;
  }
}

PyMethodDef quick_method = {"quick", reinterpret_cast<PyCFunction>(
                                         reinterpret_cast<void (*)()>(quick_call)),
                            METH_FASTCALL, "A plain call that was made before."};

nb::object quick_of(nb::handle comm) {
  if (!nb::isinstance<Handle>(comm))
    throw nb::type_error("quick_of: expected a communicator");
  return nb::steal(PyCFunction_New(&quick_method, comm.ptr()));
}

// Gives a stream one of its sockets, which is its own from here on.
void attach(Handle &comm, bool sends, std::size_t rank, std::size_t lane, std::size_t lanes,
            int fd, nb::bytes key, std::uint32_t epoch, bool messages,
            const TlsHolder *tls) {
  if (rank >= comm.size() || !comm.far(rank) || lane >= lanes)
    throw nb::value_error("attach: expected a rank of another host, and one of its lanes");
  const Key bytes = key_of(key);
  if (sends)
    (messages ? comm.post().outlet(rank) : comm.outlet(rank))
        .attach(lane, lanes, fd, bytes, epoch, tls_of(tls));
  else
    (messages ? comm.post().inlet(rank) : comm.inlet(rank))
        .attach(lane, lanes, fd, bytes, epoch, tls_of(tls));
}

std::shared_ptr<Transfer> transfer(Comm &comm, bool sends, std::int64_t peer,
                                   std::int64_t tag, std::uint64_t data, std::size_t bytes,
                                   std::uint64_t type, const Note &note,
                                   std::int64_t timeout) {
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

void set_note(Note &note, int collective, int dtype, int op, int root, std::uint64_t count,
              const std::string &algorithm) {
  note.collective = std::uint8_t(collective);
  note.dtype = std::uint8_t(dtype);
  note.op = std::uint8_t(op);
  note.root = root;
  note.count = count;
  std::strncpy(note.algorithm, algorithm.c_str(), sizeof note.algorithm - 1);
}

nb::tuple told(const Note &note) {
  return nb::make_tuple(note.seq, note.collective, note.dtype, note.op, note.root,
                        note.count, std::string(note.algorithm));
}

// What each rank last said: seq arrived at, its notes, progress, whether it left or died;
// and the call by which it was found to differ.
nb::list states(const Comm &comm) {
  nb::list all;
  for (std::size_t q = 0; q < comm.size(); ++q) {
    const RankBlock &block = comm.layout().block(q);
    if (comm.far(q)) { // what its frames told us
      const Note &note = comm.inlet(q).note();
      all.append(nb::make_tuple(note.seq, told(note), told(note), 0, block.left.load() != 0,
                                comm.mesh().dead(comm.world_rank(q)), told(block.differing)));
      continue;
    }
    const std::uint64_t a = block.headers[0].seq.load(), b = block.headers[1].seq.load();
    all.append(nb::make_tuple(std::max(a, b), told(block.notes[0]), told(block.notes[1]),
                              block.progress.load() >> action_bits, block.left.load() != 0,
                              comm.mesh().dead(comm.world_rank(q)), told(block.differing)));
  }
  return all;
}

nb::list records(const Engine &engine) {
  nb::list all;
  const auto &ring = engine.recorder->ring();
  const std::uint64_t count = engine.recorder->count();
  const std::uint64_t first = count > ring.size() ? count - ring.size() : 0;
  for (std::uint64_t i = first; i < count; ++i) {
    const Record &r = ring[i % ring.size()];
    all.append(nb::make_tuple(r.id, r.communicator, told(r.note), r.created, r.begun,
                              r.ended, r.state.load(), r.peer, r.tag, r.encoded,
                              r.decoded, r.site));
  }
  return all;
}

// What a ring of the trace holds, the oldest first, and how many entries there ever were.
template <class Ring> nb::tuple held(const Ring &ring) {
  const std::uint64_t count = ring.count.load(std::memory_order_acquire);
  const std::uint64_t first = count > ring.capacity ? count - ring.capacity : 0;
  std::string all;
  all.reserve(std::size_t(count - first) * sizeof ring.entries[0]);
  for (std::uint64_t i = first; i < count; ++i)
    all.append(reinterpret_cast<const char *>(&ring.entries[i % ring.capacity]),
               sizeof ring.entries[0]);
  return nb::make_tuple(nb::bytes(all.data(), all.size()), count);
}

// Calls, and the moments they are made of.
nb::tuple traced(const Engine &engine) {
  if (!engine.trace->made())
    return nb::make_tuple(nb::make_tuple(nb::bytes("", 0), 0), nb::make_tuple(nb::bytes("", 0), 0));
  return nb::make_tuple(held(engine.trace->calls()), held(engine.trace->moments()));
}

// A buffer in shared memory that its owner's collectives use in place.
nb::object buffer(Engine &engine, std::size_t bytes) {
  struct Hold {
    std::shared_ptr<Mesh> mesh;
    std::shared_ptr<Memory> memory;
    std::uint64_t id;
    ~Hold() { mesh->drop(id); }
  };
  std::uint64_t id;
  {
    nb::gil_scoped_release unlocked;
    id = engine.mesh->create(std::max<std::size_t>(bytes, 1));
  }
  auto *hold = new Hold{engine.mesh, engine.mesh->find(engine.mesh->rank(), id), id};
  nb::capsule owner(hold, [](void *p) noexcept { delete static_cast<Hold *>(p); });
  return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(hold->memory->data(),
                                                                    {bytes}, owner));
}

// Gives an engine its connections to other hosts, by which it hears who lives.
void live(Engine &engine, const std::vector<int> &fds, const std::vector<nb::bytes> &outgoing,
          const std::vector<nb::bytes> &incoming, std::uint32_t epoch, std::int64_t beat,
          std::int64_t limit, const nb::list &tls) {
  std::vector<Lifeline::Connection> connections(fds.size());
  for (std::size_t q = 0; q < fds.size(); ++q)
    if (fds[q] >= 0)
      connections[q] = {fds[q], key_of(outgoing.at(q)), key_of(incoming.at(q)),
                        tls_of(nb::cast<const TlsHolder *>(tls[q]))};
  // Not the engine itself, which holds the lifeline.
  const auto sink = [mesh = engine.mesh, progress = engine.progress](const Event &event) {
    if (event.kind == Event::Kind::dead && event.rank < mesh->size())
      mesh->bury(event.rank);
    else if (event.kind != Event::Kind::left)
      progress->hear(event);
  };
  engine.lifeline = std::make_shared<Lifeline>(engine.mesh->rank(), connections,
                                               Lifeline::Options{epoch, beat, limit}, sink);
}

// Notes also know the mean, which is a sum that is divided.
unisono::Op kernel_op(int op) {
  return op == int(unisono::Op::count) ? unisono::Op::sum : unisono::Op(op);
}

// Codec, elements of a block, bytes to the first code and to the next, rounded by chance,
// room for codes if they do not lie in the window.
using CodingArgs =
    std::tuple<std::string, std::size_t, std::size_t, std::size_t, bool, std::size_t>;

Plan::Coding coding_of(const CodingArgs &given, DType dtype) {
  constexpr std::size_t in_cache = 4096; // elements
  const auto &[name, block, at, stride, by_chance, room] = given;
  const Codec *codec = find_codec(name);
  if (codec == nullptr || block == 0 || !can_widen(dtype))
    throw nb::value_error("a plan has a codec that there is not, or not for its elements");
  const std::size_t frame = std::max<std::size_t>(1, frame_bytes / codec->bytes(block, block));
  const std::size_t slice = std::max<std::size_t>(1, in_cache / block);
  return {codec, dtype, block, at, stride, frame * block, slice * block, by_chance, room};
}

void bind_programs(nb::module_ &m) {
  nb::class_<Program>(m, "Program")
      .def(
          "__init__",
          [](Program *self, const Table &actions, const Table &sources, const Table &waits,
             const Table &exits, std::vector<std::int32_t> lead,
             std::vector<std::int32_t> readers, std::vector<std::int32_t> deliveries,
             std::int32_t tail, const Table &messages) {
            auto *program = new (self)
                Program{rows<Program::Action>(actions), rows<Program::Source>(sources),
                        rows<Program::Wait>(waits), rows<Program::Wait>(exits),
                        std::move(lead), std::move(readers), std::move(deliveries), tail,
                        {}, {}, {}};
            program->cross(rows<Program::Message>(messages));
          },
          nb::arg("actions"), nb::arg("sources"), nb::arg("waits"), nb::arg("exits"),
          nb::arg("lead"), nb::arg("readers"), nb::arg("deliveries"), nb::arg("tail"),
          nb::arg("messages"));
  nb::class_<Plan>(m, "Plan")
      .def(
          "__init__",
          [](Plan *self, std::vector<std::shared_ptr<Program>> programs, const Column &input_at,
             const Column &output_at, const Column &size,
             const std::vector<std::int64_t> &piece, const std::vector<std::int64_t> &pieces,
             std::size_t input_bytes, std::size_t output_bytes, std::uint64_t sent_bytes,
             std::uint32_t divisor, bool in_header, bool may_lend, bool may_reach,
             int lent_always, bool streams,
             std::uint64_t fingerprint, int collective, int dtype, int op, int root, std::uint64_t count,
             const std::string &algorithm, const nb::object &coding) {
            auto *plan = new (self) Plan;
            if (!coding.is_none())
              plan->coding = coding_of(nb::cast<CodingArgs>(coding), DType(dtype));
            for (std::size_t i = 0; i < programs.size() && i < 4; ++i) {
              plan->programs[i] = programs[i];
              plan->piece[i] = piece.at(i);
              plan->pieces[i] = pieces.at(i);
            }
            plan->input_at = values(input_at);
            plan->output_at = values(output_at);
            plan->size = values(size);
            plan->itemsize = item_size(DType(dtype));
            plan->input_bytes = input_bytes;
            plan->output_bytes = output_bytes;
            plan->kernel = find_kernel(DType(dtype), kernel_op(op));
            plan->sent_bytes = sent_bytes;
            plan->divisor = divisor;
            plan->in_header = in_header;
            plan->may_lend = may_lend;
            plan->may_reach = may_reach;
            plan->lent_always = lent_always;
            if (lent_always > 0) { // there is but this one
              plan->programs[std::size_t(lent_always)] = plan->programs[0];
              plan->piece[std::size_t(lent_always)] = plan->piece[0];
              plan->pieces[std::size_t(lent_always)] = plan->pieces[0];
            }
            plan->streams = streams;
            plan->fingerprint = fingerprint;
            set_note(plan->note, collective, dtype, op, root, count, algorithm);
          },
          nb::arg("programs"), nb::arg("input_at"), nb::arg("output_at"), nb::arg("size"),
          nb::arg("piece"), nb::arg("pieces"), nb::arg("input_bytes"),
          nb::arg("output_bytes"), nb::arg("sent_bytes"), nb::arg("divisor"), nb::arg("in_header"),
          nb::arg("may_lend"), nb::arg("may_reach"), nb::arg("lent_always"), nb::arg("streams"), nb::arg("fingerprint"), nb::arg("collective"),
          nb::arg("dtype"), nb::arg("op"), nb::arg("root"), nb::arg("count"),
          nb::arg("algorithm"), nb::arg("coding").none());
}

void bind_meshes(nb::module_ &m) {
  nb::class_<Hub>(m, "Hub").def(nb::init<std::size_t>(), nb::arg("n"));
  nb::class_<Engine>(m, "Engine")
      .def_static(
          "between_threads",
          [](std::shared_ptr<Hub> hub, std::size_t rank) {
            return Engine{std::make_shared<Mesh>(rank, hub), std::make_shared<Recorder>(),
                          std::make_shared<Progress>(), nullptr};
          },
          nb::arg("hub"), nb::arg("rank"))
      .def_static(
          "between_processes",
          [](std::size_t rank, std::vector<int> sockets, std::vector<int> pids) {
            return Engine{std::make_shared<Mesh>(rank, sockets, pids),
                          std::make_shared<Recorder>(), std::make_shared<Progress>(), nullptr};
          },
          nb::arg("rank"), nb::arg("sockets"), nb::arg("pids"))
      .def("create", [](Engine &e, std::size_t bytes) { return e.mesh->create(bytes); },
           nb::call_guard<nb::gil_scoped_release>(), nb::arg("bytes"))
      .def("has",
           [](Engine &e, std::size_t owner, std::uint64_t id) {
             return e.mesh->find(owner, id) != nullptr;
           },
           nb::arg("owner"), nb::arg("id"))
      .def("drop", [](Engine &e, std::uint64_t id) { e.mesh->drop(id); },
           nb::call_guard<nb::gil_scoped_release>(), nb::arg("id"))
      .def("buffer", &buffer, nb::arg("bytes"))
      .def("bury", [](Engine &e, std::size_t rank) { e.mesh->bury(rank); }, nb::arg("rank"))
      .def("dead", [](Engine &e, std::size_t rank) { return e.mesh->dead(rank); },
           nb::arg("rank"))
      .def("starved", [](Engine &e) { return e.mesh->starved(); })
      .def("forked", [](Engine &e) { return e.mesh->forked(); })
      .def("live", &live, nb::arg("fds"), nb::arg("outgoing"), nb::arg("incoming"),
           nb::arg("epoch"), nb::arg("beat"), nb::arg("limit"), nb::arg("tls"))
      .def("silence",
           [](Engine &e) {
             return e.lifeline ? e.lifeline->silence() : std::vector<std::int64_t>{};
           })
      .def("records", &records)
      .def("start_trace",
           [](Engine &e, std::size_t moments, std::size_t calls) {
             if (moments == 0 || calls == 0)
               throw nb::value_error("start_trace: a ring holds at least one entry");
             e.trace->start(moments, calls);
           },
           nb::arg("moments"), nb::arg("calls"))
      .def("stop_trace", [](Engine &e) { e.trace->stop(); })
      .def("traces", [](Engine &e) { return e.trace->on(); })
      .def("traced", &traced)
      .def("close",
           [](Engine &e) {
             if (e.lifeline)
               e.lifeline->close();
             e.mesh->close();
           },
           nb::call_guard<nb::gil_scoped_release>());
}

void bind_comms(nb::module_ &m) {
  nb::class_<Work>(m, "Work")
      .def("wait", &Work::wait, nb::arg("timeout"), nb::arg("helps") = true)
      .def("state", [](const Work &w) { return int(w.op->state.load(std::memory_order_acquire)); })
      .def("seq", [](const Work &w) { return w.op->seq; })
      .def("awaited", [](const Work &w) { return w.op->pending_now() ? w.late : w.op->missed; })
      .def("note", [](const Work &w) { return told(w.op->record->note); })
      .def("verdict", [](const Work &w) { return facts(w.op->verdict); })
      .def("source",
           [](const Work &w) {
             const auto *t = dynamic_cast<const Transfer *>(w.op.get());
             return t == nullptr ? std::int64_t(-1) : std::int64_t(t->source());
           })
      .def("message_bytes", [](const Work &w) {
        const auto *t = dynamic_cast<const Transfer *>(w.op.get());
        return t == nullptr ? 0 : t->message_bytes();
      });
  nb::class_<Handle>(m, "Comm")
      .def(
          "__init__",
          [](Handle *self, Engine &engine, std::vector<std::size_t> ranks, std::size_t rank,
             std::vector<std::size_t> here, std::size_t owner, std::uint64_t segment,
             std::size_t half, std::uint64_t id, std::uint64_t agreed) {
            auto memory = engine.mesh->find(owner, segment);
            if (!memory || memory->size() < Layout::bytes(ranks.size(), half))
              throw nb::value_error("the communicator's memory is missing or too small");
            new (self) Handle(engine, std::move(ranks), rank, std::move(here),
                              std::move(memory), half, id, agreed);
          },
          nb::arg("engine"), nb::arg("ranks"), nb::arg("rank"), nb::arg("here"),
          nb::arg("owner"), nb::arg("segment"), nb::arg("half"), nb::arg("id"),
          nb::arg("agreed"))
      .def("attach", &attach, nb::arg("sends"), nb::arg("rank"), nb::arg("lane"),
           nb::arg("lanes"), nb::arg("fd"), nb::arg("key"), nb::arg("epoch"),
           nb::arg("messages"), nb::arg("tls").none())
      .def("leads_to",
           [](Handle &c, std::size_t rank, bool messages) {
             return !c.far(rank) ||
                    (messages ? c.post().outlet(rank) : c.outlet(rank)).open();
           },
           nb::arg("rank"), nb::arg("messages"))
      .def_static("memory_needed", &Layout::bytes, nb::arg("n"), nb::arg("half"))
      .def("set_patience",
           [](Handle &c, std::uint32_t spins, std::uint32_t yields, std::int64_t turn,
              std::int64_t late, std::int64_t timeout) {
             c.patience = {spins, yields, turn};
             c.late_after = late;
             c.timeout = timeout;
           },
           nb::arg("spins"), nb::arg("yields"), nb::arg("turn"), nb::arg("late_after"),
           nb::arg("timeout"))
      .def("remember",
           [](Handle &c, int kind, nb::handle x, nb::handle out, nb::handle op,
              nb::handle root, std::shared_ptr<Plan> plan) {
             c.shortcuts.remember(kind, x, out, op, root, std::move(plan));
           },
           nb::arg("kind"), nb::arg("x"), nb::arg("out").none(), nb::arg("op").none(),
           nb::arg("root"), nb::arg("plan"))
      .def("run", &run, nb::arg("plan"), nb::arg("input"), nb::arg("output"),
           nb::arg("timeout"))
      .def("submit",
           [](std::shared_ptr<Handle> c, std::shared_ptr<Plan> plan, std::uint64_t input,
              std::uint64_t output, std::int64_t timeout) {
             return Work{c, begin_async(*c, plan, input, output, timeout), {}};
           },
           nb::arg("plan"), nb::arg("input"), nb::arg("output"), nb::arg("timeout"))
      .def("transfer",
           [](std::shared_ptr<Handle> c, bool sends, std::int64_t peer, std::int64_t tag,
              std::uint64_t data, std::size_t bytes, std::uint64_t type, int collective,
              int dtype, std::uint64_t count, std::int64_t timeout, bool async) {
             Note note{};
             set_note(note, collective, dtype, 0, int(peer), count, "");
             auto op = transfer(*c, sends, peer, tag, data, bytes, type, note, timeout);
             if (async)
               c->submit(op);
             else
               drive(*c, *op, bytes);
             return Work{c, op, {}};
           },
           nb::arg("sends"), nb::arg("peer"), nb::arg("tag"), nb::arg("data"),
           nb::arg("bytes"), nb::arg("type"), nb::arg("collective"), nb::arg("dtype"),
           nb::arg("count"), nb::arg("timeout"), nb::arg("async_op"))
      .def("verdict", [](const Handle &c) { return facts(c.verdict()); })
      .def("give_up",
           [](Handle &c, std::size_t rank, bool late) { // it cannot be reached
             const auto dead = c.dead();
             const auto culprit = std::uint32_t(dead < c.size() ? dead : rank);
             const bool left = c.layout().block(rank).left.load() != 0;
             const Trouble trouble = dead < c.size() ? Trouble::peer_lost
                                     : left          ? Trouble::left
                                     : late          ? Trouble::timeout
                                                     : Trouble::severed;
             c.condemn({trouble, culprit, std::uint32_t(c.rank()), std::uint32_t(c.seq + 1)});
           },
           nb::arg("rank"), nb::arg("late"))
      .def("seq", [](const Handle &c) { return c.seq; })
      .def("id", [](const Handle &c) { return c.id(); })
      .def("awaited", [](const Handle &c) { return c.awaited(); })
      .def("sent_bytes", [](const Handle &c) { return c.sent_bytes(); })
      .def("reach", [](Handle &c) { return int(c.lending().tried()); })
      .def("try_reach", [](Handle &c) { return int(c.lending().reach()); })
      .def("touched", [](Handle &c) { return c.lending().touched(); })
      .def("states", [](const Handle &c) { return states(c); })
      .def("close", [](Handle &c) { c.close(); }, nb::call_guard<nb::gil_scoped_release>());
}

} // namespace

void bind_engine(nb::module_ &m) {
  nb::register_exception_translator([](const std::exception_ptr &p, void *) {
    try {
      std::rethrow_exception(p);
    } catch (const std::system_error &e) {
      const nb::object args = nb::make_tuple(e.code().value(), nb::str(e.what()));
      const bool memory = e.code().value() == ENOMEM;
      PyErr_SetObject(memory ? PyExc_MemoryError : PyExc_OSError, args.ptr());
    }
  });
  bind_programs(m);
  bind_meshes(m);
  bind_comms(m);
  m.def("learn_arrays", &Shortcuts::learn, nb::arg("type"), nb::arg("probe"),
        nb::arg("data"), nb::arg("shape"));
  m.def("array_address", [](nb::handle x) { // 0: not an array, or not known how to read one
    const ArrayHead *a = Shortcuts::array(x);
    return a == nullptr ? std::uintptr_t(0) : reinterpret_cast<std::uintptr_t>(a->data);
  });
  m.def("quick_of", &quick_of, nb::arg("comm"));
  m.def("work_hooks", &work_hooks);
  m.def("look_for_sites", &look_for_sites, nb::arg("ours"));
  m.def("site_frames", &site_frames, nb::arg("site"));
  m.def("now_ns", &now_ns);
  m.def("arm_failpoints", &arm_failpoints, nb::arg("spec"));
  m.def("failpoint_names", &failpoint_names);
}
