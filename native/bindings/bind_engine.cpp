// Bindings of what a process has once: shared memory, connections to other hosts, the
// records of its calls and their trace.

#include "bindings/bind.hpp"

#include <algorithm>
#include <string>
#include <system_error>
#include <vector>

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings/call_sites.hpp"
#include "bindings/handle.hpp"
#include "bindings/interpreter_lock.hpp"
#include "bindings/wire_holder.hpp"
#include "engine/progress.hpp"
#include "memory/shared_pages.hpp"
#include "net/io_threads.hpp"
#include "net/lifeline.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

// What Python holds of a table of ranks that are threads. Not the table itself: its last
// reference may be a native thread's, which does not have the interpreter lock.
struct PeerTableHolder {
  explicit PeerTableHolder(std::size_t n) : table(std::make_shared<PeerTable>(n)) {}
  std::shared_ptr<PeerTable> table;
};

Engine engine_on(std::shared_ptr<HostPeers> host_peers) {
  return {std::move(host_peers), std::make_shared<Recorder>(), make_fork_safe<Progress>(),
          nullptr, nullptr};
}

// Lets records and traces know of all calls that have ended.
void ask_sources(const Engine &engine) {
  if (!engine.host_peers->forked())
    engine.recorder->ask_sources();
}

// A record, whose call may go on meanwhile. Not inlined, for ThreadSanitizer: test/tsan.supp.
[[gnu::noinline]] nb::tuple record_tuple(const Record &r) {
  return nb::make_tuple(r.id, r.communicator, note_tuple(r.note), r.created, r.begun, r.ended,
                        r.state.load(), r.peer, r.tag, r.encoded, r.decoded, r.site, r.device,
                        r.stream, r.timed);
}

// The recorded calls, the oldest first.
nb::list records(const Engine &engine) {
  ask_sources(engine);
  nb::list all;
  const auto &ring = engine.recorder->ring();
  const std::uint64_t count = engine.recorder->count();
  const std::uint64_t first = count > ring.size() ? count - ring.size() : 0;
  for (std::uint64_t i = first; i < count; ++i)
    all.append(record_tuple(ring[i % ring.size()]));
  return all;
}

// The entries of a ring of the trace, the oldest first, and how many there ever were.
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

// Calls, and the moments that they consist of.
nb::tuple traced(const Engine &engine) {
  ask_sources(engine);
  const auto nothing = [] { return nb::make_tuple(nb::bytes("", 0), 0); };
  if (!engine.trace->made())
    return nb::make_tuple(nothing(), nothing());
  return nb::make_tuple(held(engine.trace->calls()), held(engine.trace->moments()));
}

using Buffer = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

// A buffer in shared memory that its owner's collectives access in place.
Buffer buffer(Engine &engine, std::size_t bytes) {
  struct Hold {
    std::shared_ptr<HostPeers> host_peers;
    std::shared_ptr<Memory> memory;
    std::uint64_t id;
    ~Hold() { host_peers->drop(id); }
  };
  std::uint64_t id;
  {
    nb::gil_scoped_release unlocked;
    id = engine.host_peers->create(std::max<std::size_t>(bytes, 1));
  }
  auto *hold = new Hold{engine.host_peers,
                        engine.host_peers->find(engine.host_peers->rank(), id), id};
  nb::capsule owner(hold, [](void *p) noexcept { delete static_cast<Hold *>(p); });
  return Buffer(hold->memory->data(), {bytes}, owner);
}

// Memory that was allocated by others, shared as long as this lives or until `end`.
class Registration {
public:
  Registration(std::shared_ptr<HostPeers> host_peers, std::byte *data, std::size_t bytes)
      : host_peers_(std::move(host_peers)), id_(host_peers_->share(data, bytes)),
        pages_(host_peers_->shared(id_)) {}
  ~Registration() { end(); }
  Registration(const Registration &) = delete;
  Registration &operator=(const Registration &) = delete;

  void end(bool freed = false) {
    const auto pages = std::exchange(pages_, nullptr);
    if (pages && freed)
      pages->abandon();
    if (pages && host_peers_->forked())
      pages->restore(); // another thread may have held the locks of the ranks at the fork
    else if (pages)
      host_peers_->unshare(id_);
  }

private:
  std::shared_ptr<HostPeers> host_peers_;
  std::uint64_t id_;
  std::shared_ptr<SharedPages> pages_;
};

// How other ranks access a buffer of this rank: src/unisono/runtime/call/registered.py
// (`MemoryHome`).
int memory_home(const Engine &engine, std::uintptr_t at, std::size_t bytes) {
  const auto *const data = reinterpret_cast<const std::byte *>(at);
  const auto found = engine.host_peers->locate(data, bytes);
  if (found && found->exposed.segment == ExposedBuffer::anywhere)
    return 1;
  if (found)
    return found->pages ? 3 : 2;
  return SharedPages::find(data, bytes) ? 4 : SharedPages::any(data, bytes) ? 5 : 0;
}

// Gives an engine its connections to other hosts, which report liveness.
void live(Engine &engine, const std::vector<WireHolder *> &wires,
          const std::vector<nb::bytes> &outgoing, const std::vector<nb::bytes> &incoming,
          std::uint32_t epoch, std::int64_t beat, std::int64_t limit) {
  std::vector<Lifeline::Connection> connections(wires.size());
  for (std::size_t q = 0; q < wires.size(); ++q)
    if (wires[q] != nullptr)
      connections[q] = {std::move(wires[q]->held()), key_of(outgoing.at(q)),
                        key_of(incoming.at(q))};
  // Not the engine itself, which owns the lifeline.
  const auto sink = [host_peers = engine.host_peers,
                     progress = engine.progress](const Event &event) {
    if (event.kind == Event::Kind::dead && event.rank < host_peers->size())
      host_peers->mark_dead(event.rank);
    else if (event.kind != Event::Kind::left)
      progress->handle_event(event);
  };
  engine.lifeline =
      make_fork_safe<Lifeline>(engine.host_peers->rank(), std::move(connections),
                               Lifeline::Options{epoch, beat, limit}, sink);
}

// System errors are raised as OSError, or MemoryError for ENOMEM.
void translate(const std::exception_ptr &p, void *) {
  try {
    std::rethrow_exception(p);
  } catch (const std::system_error &e) {
    const nb::object args = nb::make_tuple(e.code().value(), nb::str(e.what()));
    const bool memory = e.code().value() == ENOMEM;
    PyErr_SetObject(memory ? PyExc_MemoryError : PyExc_OSError, args.ptr());
  }
}

} // namespace

void bind_engine(nb::module_ &m) {
  nb::register_exception_translator(translate);
  nb::class_<PeerTableHolder>(m, "PeerTable").def(nb::init<std::size_t>(), nb::arg("n"));
  nb::class_<Registration>(m, "Registration")
      .def("end", &Registration::end, nb::call_guard<GilRelease>(), nb::arg("freed") = false);
  nb::class_<Engine>(m, "Engine")
      .def_static(
          "between_threads",
          [](const PeerTableHolder &held, std::size_t rank) {
            return engine_on(make_fork_safe<HostPeers>(rank, held.table));
          },
          nb::arg("table"), nb::arg("rank"))
      .def_static(
          "between_processes",
          [](std::size_t rank, std::vector<int> sockets, std::vector<int> pids) {
            return engine_on(make_fork_safe<HostPeers>(rank, sockets, pids));
          },
          nb::arg("rank"), nb::arg("sockets"), nb::arg("pids"))
      .def(
          "create",
          [](Engine &e, std::size_t bytes) { return e.host_peers->create(bytes); },
          nb::call_guard<GilRelease>(), nb::arg("bytes"))
      .def(
          "has",
          [](Engine &e, std::size_t owner, std::uint64_t id) {
            return e.host_peers->find(owner, id) != nullptr;
          },
          nb::arg("owner"), nb::arg("id"))
      .def(
          "drop", [](Engine &e, std::uint64_t id) { e.host_peers->drop(id); },
          nb::call_guard<GilRelease>(), nb::arg("id"))
      .def("buffer", &buffer, nb::arg("bytes"))
      .def(
          "register",
          [](Engine &e, std::uintptr_t at, std::size_t bytes) {
            return std::make_unique<Registration>(
                e.host_peers, reinterpret_cast<std::byte *>(at), bytes);
          },
          nb::call_guard<GilRelease>(), nb::arg("at"), nb::arg("bytes"))
      .def("memory_home", &memory_home, nb::arg("at"), nb::arg("bytes"))
      .def(
          "mark_dead", [](Engine &e, std::size_t rank) { e.host_peers->mark_dead(rank); },
          nb::arg("rank"))
      .def(
          "dead", [](Engine &e, std::size_t rank) { return e.host_peers->dead(rank); },
          nb::arg("rank"))
      .def(
          "ended", [](Engine &e, std::size_t rank) { return e.host_peers->ended(rank); },
          nb::arg("rank"))
      .def("out_of_resources", [](Engine &e) { return e.host_peers->out_of_resources(); })
      .def("forked", [](Engine &e) { return e.host_peers->forked(); })
      .def("connect_lifeline", &live, nb::arg("wires"), nb::arg("outgoing"),
           nb::arg("incoming"), nb::arg("epoch"), nb::arg("beat"), nb::arg("limit"))
      .def(
          "use_io_threads", // by communicators that are made later
          [](Engine &e, std::size_t count, std::size_t least_bytes, std::size_t adders) {
            least_bytes = std::max<std::size_t>(least_bytes, 1);
            adders = std::min(adders, count);
            e.io_threads =
                count == 0 ? nullptr : make_fork_safe<IoThreads>(count, least_bytes, adders);
          },
          nb::arg("count"), nb::arg("least_bytes"), nb::arg("adders"))
      .def("silence",
           [](Engine &e) {
             return e.lifeline ? e.lifeline->silence() : std::vector<std::int64_t>{};
           })
      .def("records", &records)
      .def(
          "start_trace",
          [](Engine &e, std::size_t moments, std::size_t calls) {
            if (moments == 0 || calls == 0)
              throw nb::value_error("start_trace: a ring holds at least one entry");
            e.trace->start(moments, calls);
          },
          nb::arg("moments"), nb::arg("calls"))
      .def("stop_trace", [](Engine &e) { e.trace->stop(); })
      .def("is_tracing", [](Engine &e) { return e.trace->on(); })
      .def("trace_entries", &traced)
      .def(
          "close",
          [](Engine &e) {
            if (e.lifeline)
              e.lifeline->close();
            e.host_peers->close();
          },
          nb::call_guard<GilRelease>());
  m.def("enable_call_sites", &enable_call_sites, nb::arg("ours"));
  m.def("call_site_frames", &call_site_frames, nb::arg("site"));
  m.def("thread_stacks", &thread_stacks, nb::arg("deepest"));
  m.def("now_ns", &now_ns);
  m.def("process_exiting", [] { process_exiting.store(true, std::memory_order_release); });
}
