// Binding of lowering: the arrays of a schedule's steps in, one rank's program out.

#include "bindings/bind.hpp"

#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/handle.hpp"
#include "lower/lower.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = Array<std::int64_t>;
using Bools = Array<bool>;
// src, dst, chunk, reduces, into
using Transfers = std::tuple<Ints, Ints, Ints, Bools, Ints>;
using Holders = std::optional<Ints>; // none: all ranks hold every chunk

template <class T> std::span<const T> span_of(const Array<T> &array, std::size_t count) {
  if (array.size() != count)
    throw nb::value_error("lower: the arrays of a step differ in length");
  return {array.data(), count};
}

lowering::Step step_of(const Transfers &given) {
  const auto &[src, dst, chunk, reduces, into] = given;
  const std::size_t count = src.size();
  return {span_of(src, count), span_of(dst, count), span_of(chunk, count),
          span_of(into, count), span_of(reduces, count)};
}

std::span<const std::int64_t> holders_of(const Holders &given, std::int64_t chunks,
                                         std::int64_t n) {
  if (!given)
    return {};
  if (std::cmp_not_equal(given->size(), chunks))
    throw nb::value_error("lower: expected a rank for every chunk");
  const std::span<const std::int64_t> holders(given->data(), given->size());
  for (const std::int64_t rank : holders)
    if (rank < 0 || rank >= n)
      throw nb::value_error("lower: a chunk is held by no rank");
  return holders;
}

// The program, the places of a window, the steps that follow each other, the length of the
// longest program, and the ranks that this one sends to.
using LoweredRank = std::tuple<ProgramHolder, std::int32_t, std::int32_t, std::size_t,
                               std::vector<std::size_t>>;

LoweredRank rank_of(lowering::Lowered &&made) {
  std::set<std::size_t> to;
  for (const Program::Outgoing &outgoing : made.program.outgoing)
    to.insert(outgoing.to);
  return {ProgramHolder{std::make_shared<Program>(std::move(made.program))}, made.places,
          made.depth, made.longest, {to.begin(), to.end()}};
}

std::optional<LoweredRank> lower(std::int64_t n, std::int64_t num_chunks,
                                 std::int64_t num_slots, const Holders &before,
                                 const Holders &after, const std::vector<Transfers> &steps,
                                 const std::vector<std::int64_t> &hosts, bool input_shared,
                                 bool output_shared, std::int32_t rank) {
  if (std::cmp_not_equal(hosts.size(), n) || rank < 0 || rank >= n || num_chunks < 0 ||
      num_slots < num_chunks)
    throw nb::value_error("lower: expected a host for every rank, and one of the ranks");
  lowering::Input input{n, num_chunks, num_slots, holders_of(before, num_chunks, n),
                        holders_of(after, num_chunks, n), hosts, {}};
  for (const Transfers &step : steps)
    input.steps.push_back(step_of(step));
  const nb::gil_scoped_release released;
  auto made = lowering::lower(input, {input_shared, output_shared}, rank);
  return made ? std::optional(rank_of(*std::move(made))) : std::nullopt;
}

// The tables of a program, as its constructor takes them, for tests.
auto tables(const ProgramHolder &self) {
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

void bind_lower(nb::module_ &m) {
  m.def("lower", &lower, nb::arg("n"), nb::arg("num_chunks"), nb::arg("num_slots"),
        nb::arg("before").none(), nb::arg("after").none(), nb::arg("steps"),
        nb::arg("hosts"), nb::arg("input_shared"), nb::arg("output_shared"),
        nb::arg("rank"));
  m.def("program_tables", &tables, nb::arg("program"));
}
