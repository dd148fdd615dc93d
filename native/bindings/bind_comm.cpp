// Bindings of a communicator: construction, configuration, and the state of its ranks. How
// calls begin on it is in bind_calls.cpp.

#include "bindings/bind.hpp"

#include <algorithm>

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/handle.hpp"
#include "bindings/interpreter_lock.hpp"
#include "bindings/wire_holder.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

void construct(Handle *self, Engine &engine, std::vector<std::size_t> ranks,
               std::size_t rank, std::vector<std::size_t> local_ranks, std::size_t owner,
               std::uint64_t segment, std::size_t half, std::uint64_t id,
               std::uint64_t shared_id) {
  if (ranks.size() > Failure::most_ranks)
    throw nb::value_error("a communicator has more ranks than a failure can name");
  auto memory = engine.host_peers->find(owner, segment);
  if (!memory || memory->size() < Layout::bytes(ranks.size(), local_ranks.size(), half))
    throw nb::value_error("the communicator's memory is missing or too small");
  memory->populate();
  new (self) Handle(engine, std::move(ranks), rank, std::move(local_ranks),
                    std::move(memory), half, id, shared_id);
}

// Attaches a wire to a stream, which owns it unless this throws.
void attach(Handle &comm, bool sends, std::size_t rank, std::size_t lane, std::size_t lanes,
            WireHolder &wire, nb::bytes key, std::uint32_t epoch, bool messages,
            bool takes_free_lane) {
  if (rank >= comm.size() || !comm.is_remote(rank))
    throw nb::value_error("attach: expected a rank of another host");
  const auto give = [&](auto &stream) {
    return stream.attach(lane, lanes, wire.held(), key_of(key), epoch, takes_free_lane);
  };
  const bool taken =
      sends ? give(messages ? comm.channels().send_stream(rank) : comm.send_stream(rank))
            : give(messages ? comm.channels().receive_stream(rank)
                            : comm.receive_stream(rank));
  if (!taken)
    throw nb::value_error("attach: expected one of the lanes that are missing");
}

bool leads_to(Handle &comm, std::size_t rank, bool messages) {
  return !comm.is_remote(rank) ||
         (messages ? comm.channels().send_stream(rank) : comm.send_stream(rank)).open();
}

void set_patience(Handle &comm, std::uint32_t spins, std::uint32_t yields,
                  std::int64_t turn, std::int64_t late_after, std::int64_t timeout) {
  comm.wait_policy = {spins, yields, turn};
  comm.late_after = late_after;
  comm.timeout = timeout;
}

// Aborts it because a rank cannot be connected to, in time or at all.
void abort_unreachable(Handle &comm, std::size_t rank, bool late) {
  const auto dead = comm.first_dead();
  const auto culprit = std::uint32_t(dead < comm.size() ? dead : rank);
  const bool left = comm.has_left(rank);
  const FailureKind kind = dead < comm.size() ? FailureKind::peer_lost
                          : left             ? FailureKind::closed
                          : late             ? FailureKind::timeout
                                             : FailureKind::connection_lost;
  comm.abort(
      {kind, culprit, std::uint32_t(comm.rank()),
       std::uint32_t(comm.seq.load(std::memory_order_relaxed) + 1)});
}

// What each rank has published: the call it has arrived at, its notes, progress, whether it
// has closed or died; and the call by which it was found to differ.
nb::list states(const Handle &comm) {
  nb::list all;
  for (std::size_t q = 0; q < comm.size(); ++q) {
    const RankBlock &block = comm.layout().block(q);
    // Read in this order: a rank that leaves announces that before its process ends.
    const bool dead = comm.host_peers().dead(comm.world_rank(q)), left = comm.has_left(q);
    if (comm.is_remote(q)) { // from its frames
      const Note &note = comm.receive_stream(q).note();
      all.append(nb::make_tuple(note.seq, note_tuple(note), note_tuple(note), 0, left, dead,
                                note_tuple(block.differing)));
      continue;
    }
    const std::uint64_t a = block.headers[0].seq.load(), b = block.headers[1].seq.load();
    all.append(nb::make_tuple(
        std::max(a, b), note_tuple(block.notes[0]), note_tuple(block.notes[1]),
        block.progress.load() >> action_bits, left, dead, note_tuple(block.differing)));
  }
  return all;
}

} // namespace

void bind_comm(nb::module_ &m) {
  nb::class_<Handle> comm(m, "Comm");
  comm.def("__init__", &construct, nb::arg("engine"), nb::arg("ranks"), nb::arg("rank"),
           nb::arg("local_ranks"), nb::arg("owner"), nb::arg("segment"), nb::arg("half"),
           nb::arg("id"), nb::arg("shared_id"))
      .def_static("memory_needed", &Layout::bytes, nb::arg("n"), nb::arg("windows"),
                  nb::arg("half"))
      .def("attach", &attach, nb::arg("sends"), nb::arg("rank"), nb::arg("lane"),
           nb::arg("lanes"), nb::arg("wire"), nb::arg("key"), nb::arg("epoch"),
           nb::arg("messages"), nb::arg("takes_free_lane") = false)
      .def("is_connected_to", &leads_to, nb::arg("rank"), nb::arg("messages"))
      .def("set_wait_policy", &set_patience, nb::arg("spins"), nb::arg("yields"),
           nb::arg("longest_yield"), nb::arg("late_after"), nb::arg("timeout"))
      .def("set_late_hint", [](Handle &c, std::string hint) { c.late_hint = std::move(hint); },
           nb::arg("hint"))
      .def("set_timeout", [](Handle &c, std::int64_t timeout) { c.timeout = timeout; },
           nb::arg("timeout"))
      .def("failure", [](const Handle &c) { return failure_tuple(c.failure()); })
      .def("ends_next_call", [](const Handle &c) { return c.ends_next_call(); })
      .def("announce_connecting", &Comm::announce_connecting, nb::arg("rank"), nb::arg("lasts"))
      .def("abort_unreachable", &abort_unreachable, nb::arg("rank"), nb::arg("late"))
      .def("seq", [](const Handle &c) { return c.seq.load(std::memory_order_relaxed); })
      .def("id", [](const Handle &c) { return c.id(); })
      .def("awaited", [](const Handle &c) { return c.awaited(); })
      .def("sent_bytes", [](const Handle &c) { return c.sent_bytes(); })
      .def("sent_on_devices", [](const Handle &c) { return c.sent_on_devices(); })
      .def("cross_memory_access", [](Handle &c) { return int(c.zero_copy().access()); })
      .def("test_cross_memory_access", [](Handle &c) { return int(c.zero_copy().test_access()); })
      .def("has_writers", [](Handle &c) { return c.zero_copy().has_writers(); })
      .def("states", &states)
      .def("close", [](Handle &c) { c.close(); }, nb::call_guard<GilRelease>());
  bind_calls(m, comm);
}
