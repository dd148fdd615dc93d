// The Python face of a communicator: how it is made, what it is given, and what it can be
// asked about its ranks. How calls begin on it is in bind_calls.cpp.

#include "bindings/bind.hpp"

#include <algorithm>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/handle.hpp"
#include "bindings/wire_holder.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

void construct(Handle *self, Engine &engine, std::vector<std::size_t> ranks,
               std::size_t rank, std::vector<std::size_t> here, std::size_t owner,
               std::uint64_t segment, std::size_t half, std::uint64_t id,
               std::uint64_t agreed) {
  if (ranks.size() > Verdict::most_ranks)
    throw nb::value_error("a communicator has more ranks than a verdict can name");
  auto memory = engine.mesh->find(owner, segment);
  if (!memory || memory->size() < Layout::bytes(ranks.size(), here.size(), half))
    throw nb::value_error("the communicator's memory is missing or too small");
  memory->populate();
  new (self) Handle(engine, std::move(ranks), rank, std::move(here), std::move(memory),
                    half, id, agreed);
}

// Gives a stream one of its wires, which is its own from here on, if this does not throw.
void attach(Handle &comm, bool sends, std::size_t rank, std::size_t lane, std::size_t lanes,
            WireHolder &wire, nb::bytes key, std::uint32_t epoch, bool messages) {
  if (rank >= comm.size() || !comm.far(rank))
    throw nb::value_error("attach: expected a rank of another host");
  const auto give = [&](auto &stream) {
    return stream.attach(lane, lanes, wire.held(), key_of(key), epoch);
  };
  const bool taken = sends ? give(messages ? comm.post().outlet(rank) : comm.outlet(rank))
                           : give(messages ? comm.post().inlet(rank) : comm.inlet(rank));
  if (!taken)
    throw nb::value_error("attach: expected one of the lanes that are missing");
}

bool leads_to(Handle &comm, std::size_t rank, bool messages) {
  return !comm.far(rank) ||
         (messages ? comm.post().outlet(rank) : comm.outlet(rank)).open();
}

void set_patience(Handle &comm, std::uint32_t spins, std::uint32_t yields,
                  std::int64_t turn, std::int64_t late_after, std::int64_t timeout) {
  comm.patience = {spins, yields, turn};
  comm.late_after = late_after;
  comm.timeout = timeout;
}

// Breaks it because a rank cannot be reached, in time or at all.
void give_up(Handle &comm, std::size_t rank, bool late) {
  const auto dead = comm.dead();
  const auto culprit = std::uint32_t(dead < comm.size() ? dead : rank);
  const bool left = comm.layout().block(rank).left.load() != 0;
  const Trouble trouble = dead < comm.size() ? Trouble::peer_lost
                          : left             ? Trouble::left
                          : late             ? Trouble::timeout
                                             : Trouble::severed;
  comm.condemn(
      {trouble, culprit, std::uint32_t(comm.rank()), std::uint32_t(comm.seq + 1)});
}

// What each rank last said: seq arrived at, its notes, progress, whether it left or died;
// and the call by which it was found to differ.
nb::list states(const Handle &comm) {
  nb::list all;
  for (std::size_t q = 0; q < comm.size(); ++q) {
    const RankBlock &block = comm.layout().block(q);
    const bool left = block.left.load() != 0, dead = comm.mesh().dead(comm.world_rank(q));
    if (comm.far(q)) { // what its frames told us
      const Note &note = comm.inlet(q).note();
      all.append(nb::make_tuple(note.seq, told(note), told(note), 0, left, dead,
                                told(block.differing)));
      continue;
    }
    const std::uint64_t a = block.headers[0].seq.load(), b = block.headers[1].seq.load();
    all.append(nb::make_tuple(std::max(a, b), told(block.notes[0]), told(block.notes[1]),
                              block.progress.load() >> action_bits, left, dead,
                              told(block.differing)));
  }
  return all;
}

} // namespace

void bind_comm(nb::module_ &m) {
  nb::class_<Handle> comm(m, "Comm");
  comm.def("__init__", &construct, nb::arg("engine"), nb::arg("ranks"), nb::arg("rank"),
           nb::arg("here"), nb::arg("owner"), nb::arg("segment"), nb::arg("half"),
           nb::arg("id"), nb::arg("agreed"))
      .def_static("memory_needed", &Layout::bytes, nb::arg("n"), nb::arg("windows"),
                  nb::arg("half"))
      .def("attach", &attach, nb::arg("sends"), nb::arg("rank"), nb::arg("lane"),
           nb::arg("lanes"), nb::arg("wire"), nb::arg("key"), nb::arg("epoch"),
           nb::arg("messages"))
      .def("leads_to", &leads_to, nb::arg("rank"), nb::arg("messages"))
      .def("set_patience", &set_patience, nb::arg("spins"), nb::arg("yields"),
           nb::arg("turn"), nb::arg("late_after"), nb::arg("timeout"))
      .def("set_timeout", [](Handle &c, std::int64_t timeout) { c.timeout = timeout; },
           nb::arg("timeout"))
      .def("verdict", [](const Handle &c) { return facts(c.verdict()); })
      .def("tell_connecting", &Comm::tell_connecting, nb::arg("rank"), nb::arg("lasts"))
      .def("give_up", &give_up, nb::arg("rank"), nb::arg("late"))
      .def("seq", [](const Handle &c) { return c.seq; })
      .def("id", [](const Handle &c) { return c.id(); })
      .def("awaited", [](const Handle &c) { return c.awaited(); })
      .def("sent_bytes", [](const Handle &c) { return c.sent_bytes(); })
      .def("reach", [](Handle &c) { return int(c.lending().tried()); })
      .def("try_reach", [](Handle &c) { return int(c.lending().reach()); })
      .def("touched", [](Handle &c) { return c.lending().touched(); })
      .def("states", &states)
      .def("close", [](Handle &c) { c.close(); }, nb::call_guard<nb::gil_scoped_release>());
  bind_calls(m, comm);
}
