// The tables of a program, so that tests can compare programs.

#include "test/bind_test_hooks.hpp"

#include <tuple>
#include <vector>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/handle.hpp"
#include "engine/program.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

// As the constructor takes them.
auto tables_of_program(const ProgramHolder &self) {
  const Program &made = *self.program;
  std::vector<std::vector<std::int32_t>> actions, sources, waits, exits, messages;
  for (const Program::Action &a : made.actions)
    actions.push_back({a.chunk, a.window, a.output, a.completes, a.first_source, a.end_source,
                       a.first_wait, a.end_wait, a.first_delivery, a.end_delivery, a.code,
                       a.back, a.is_awaited});
  for (const Program::Source &s : made.sources)
    sources.push_back({s.home, s.rank, s.index});
  for (const Program::Wait &w : made.waits)
    waits.push_back({w.rank, w.count});
  for (const Program::Wait &w : made.exits)
    exits.push_back({w.rank, w.count});
  for (const Program::Outgoing &outgoing : made.outgoing)
    for (const Program::Message &m : outgoing.messages)
      messages.push_back({m.to, m.chunk, m.home, m.index, m.after});
  return std::make_tuple(actions, sources, waits, exits, made.lead, made.readers,
                         made.deliveries, messages, made.incoming);
}

} // namespace

void bind_program_tables(nb::module_ &m) {
  m.def("program_tables", &tables_of_program, nb::arg("program"));
}
