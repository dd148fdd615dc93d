// Binding of lowering: the arrays of a schedule's steps in, one rank's program out.

#include "bindings/bind.hpp"

#include <limits>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings/handle.hpp"
#include "lower/lower.hpp"
#include "lower/versions.hpp"

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
// longest program, whether every sum is made in one pass, and the ranks that this one sends
// to.
using LoweredRank = std::tuple<ProgramHolder, std::int32_t, std::int32_t, std::size_t, bool,
                               std::vector<std::size_t>>;
// The step and the transfer that reads a slot which has nothing.
using Empty = std::tuple<std::int32_t, std::size_t>;

LoweredRank rank_of(lowering::Lowered &&made) {
  std::set<std::size_t> to;
  for (const Program::Outgoing &outgoing : made.program.outgoing)
    to.insert(outgoing.to);
  return {ProgramHolder{std::make_shared<Program>(std::move(made.program))}, made.places,
          made.depth, made.longest, made.canonical, {to.begin(), to.end()}};
}

void require(bool holds, const char *otherwise) {
  if (!holds)
    throw nb::value_error(otherwise);
}

// How many versions and sources there can be at most: their indices have 32 bits.
std::int64_t most_indices(std::int64_t n, std::int64_t num_chunks, const Holders &before,
                          const std::vector<Transfers> &steps) {
  std::int64_t transfers = 0;
  for (const Transfers &step : steps)
    transfers += static_cast<std::int64_t>(std::get<0>(step).size());
  return (before ? num_chunks : n * num_chunks) + 2 * transfers;
}

// None if the schedule adds chunks of different names.
std::variant<LoweredRank, Empty, std::monostate>
lower(std::int64_t n, std::int64_t num_chunks, std::int64_t num_slots, const Holders &before,
      const Holders &after, const std::vector<Transfers> &steps,
      const std::vector<std::int64_t> &hosts, bool input_shared, bool output_shared,
      std::int32_t rank) {
  constexpr auto most = std::numeric_limits<std::int32_t>::max();
  require(std::cmp_equal(hosts.size(), n), "lower: expected a host for every rank");
  require(rank >= 0 && rank < n, "lower: expected one of the ranks");
  require(num_chunks >= 0 && num_slots >= num_chunks, "lower: fewer slots than chunks");
  require(num_slots <= most && n <= most, "lower: there are more chunks than can be numbered");
  require(most_indices(n, num_chunks, before, steps) <= most,
          "lower: there are more values than can be numbered");
  lowering::Input input{n, num_chunks, num_slots, holders_of(before, num_chunks, n),
                        holders_of(after, num_chunks, n), hosts, {}};
  for (const Transfers &step : steps)
    input.steps.push_back(step_of(step));
  const nb::gil_scoped_release released;
  try {
    if (auto made = lowering::lower(input, {input_shared, output_shared}, rank))
      return rank_of(*std::move(made));
  } catch (const lowering::EmptySlot &empty) {
    return Empty{empty.step, empty.transfer};
  }
  return std::monostate{};
}

} // namespace

void bind_lower(nb::module_ &m) {
  m.def("lower", &lower, nb::arg("n"), nb::arg("num_chunks"), nb::arg("num_slots"),
        nb::arg("before").none(), nb::arg("after").none(), nb::arg("steps"),
        nb::arg("hosts"), nb::arg("input_shared"), nb::arg("output_shared"),
        nb::arg("rank"));
}
