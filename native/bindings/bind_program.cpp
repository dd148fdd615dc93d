// Bindings of programs, which come as tables of numbers, and plans: a program for each
// combination of exposed buffers, and the offsets of the chunks.

#include "bindings/bind.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/handle.hpp"
#include "engine/program.hpp"

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

void make_program(ProgramHolder *self, const Table &actions, const Table &sources,
                  const Table &waits, const Table &exits, std::vector<std::int32_t> lead,
                  std::vector<std::int32_t> readers, std::vector<std::int32_t> deliveries,
                  const Table &messages) {
  if (actions.shape(0) > most_actions)
    throw nb::value_error("a program has more actions than a progress word can count");
  auto program = std::make_shared<Program>(
      Program{rows<Program::Action>(actions), rows<Program::Source>(sources),
              rows<Program::Wait>(waits), rows<Program::Wait>(exits), std::move(lead),
              std::move(readers), std::move(deliveries), {}, {}, {}});
  program->add_messages(rows<Program::Message>(messages));
  new (self) ProgramHolder{std::move(program)};
}

// A note may also name the mean, which is a sum that is divided.
unisono::Op kernel_op(int op) {
  return op == int(unisono::Op::count) ? unisono::Op::sum : unisono::Op(op);
}

// Codec, elements per block, bytes to the first code and from one to the next, stochastic
// rounding, bytes for codes outside the window.
using CodingArgs =
    std::tuple<std::string, std::size_t, std::size_t, std::size_t, bool, std::size_t>;

Plan::Coding coding_of(const CodingArgs &given, DType dtype) {
  constexpr std::size_t in_cache = 4096; // elements
  const auto &[name, block, at, stride, by_chance, room] = given;
  const Codec *codec = find_codec(name);
  if (codec == nullptr || block == 0 || !can_widen(dtype))
    throw nb::value_error("a plan has a codec that there is not, or not for its elements");
  const std::size_t frame =
      std::max<std::size_t>(1, frame_bytes / codec->bytes(block, block));
  const std::size_t slice = std::max<std::size_t>(1, in_cache / block);
  return {codec, dtype, block, at, stride, frame * block, slice * block, by_chance, room};
}

void make_plan(PlanHolder *self, const std::vector<const ProgramHolder *> &programs,
               const Column &input_at, const Column &output_at, const Column &size,
               const std::vector<std::int64_t> &piece,
               const std::vector<std::int64_t> &pieces, std::size_t input_bytes,
               std::size_t output_bytes, std::uint64_t sent_bytes, std::uint32_t divisor,
               bool in_header, bool may_expose, bool may_cross_memory, int always_exposed,
               bool streams, std::uint64_t fingerprint, int collective, int dtype, int op,
               int root, std::uint64_t count, std::uint64_t content,
               const std::vector<std::string> &texts,
               const std::optional<CodingArgs> &coding, std::int32_t places) {
  Note note{};
  if (!set_texts(note, texts))
    throw nb::value_error("a plan has names that are longer than a note");
  const auto plan = std::make_shared<Plan>();
  if (coding)
    plan->coding = coding_of(*coding, DType(dtype));
  for (std::size_t i = 0; i < programs.size() && i < 4; ++i) {
    if (programs[i]->program->actions.size() > most_actions)
      throw nb::value_error("a program has more actions than a progress word can count");
    plan->programs[i] = programs[i]->program;
    plan->piece[i] = piece.at(i);
    plan->pieces[i] = pieces.at(i);
  }
  plan->input_at = values(input_at);
  plan->output_at = values(output_at);
  plan->size = values(size);
  plan->places = places;
  plan->itemsize = item_size(DType(dtype));
  plan->input_bytes = input_bytes;
  plan->output_bytes = output_bytes;
  plan->kernel = find_kernel(DType(dtype), kernel_op(op));
  plan->sent_bytes = sent_bytes;
  plan->divisor = divisor;
  plan->in_header = in_header;
  plan->may_expose = may_expose;
  plan->may_cross_memory = may_cross_memory;
  plan->always_exposed = always_exposed;
  if (always_exposed > 0) { // there is only this one
    plan->programs[std::size_t(always_exposed)] = plan->programs[0];
    plan->piece[std::size_t(always_exposed)] = plan->piece[0];
    plan->pieces[std::size_t(always_exposed)] = plan->pieces[0];
  }
  plan->streams = streams;
  plan->fingerprint = fingerprint;
  set_note(note, collective, dtype, op, root, count);
  note.fingerprint = fingerprint;
  note.content = content;
  plan->note = note;
  new (self) PlanHolder{plan};
}

} // namespace

void bind_program(nb::module_ &m) {
  m.attr("NOTE_BYTES") = sizeof(Note::text);
  m.attr("MOST_ACTIONS") = most_actions;
  m.attr("MOST_RANKS") = Failure::most_ranks;
  nb::class_<ProgramHolder>(m, "Program")
      .def("__init__", &make_program, nb::arg("actions"), nb::arg("sources"),
           nb::arg("waits"), nb::arg("exits"), nb::arg("lead"), nb::arg("readers"),
           nb::arg("deliveries"), nb::arg("messages"));
  nb::class_<PlanHolder>(m, "Plan")
      .def("__init__", &make_plan, nb::arg("programs"), nb::arg("input_at"),
           nb::arg("output_at"), nb::arg("size"), nb::arg("piece"), nb::arg("pieces"),
           nb::arg("input_bytes"), nb::arg("output_bytes"), nb::arg("sent_bytes"),
           nb::arg("divisor"), nb::arg("in_header"), nb::arg("may_expose"),
           nb::arg("may_cross_memory"), nb::arg("always_exposed"), nb::arg("streams"),
           nb::arg("fingerprint"), nb::arg("collective"), nb::arg("dtype"), nb::arg("op"),
           nb::arg("root"), nb::arg("count"), nb::arg("content"), nb::arg("texts"),
           nb::arg("coding").none(), nb::arg("places") = 0);
}
