#include "device/tables.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>

namespace unisono::device {

namespace {

constexpr std::size_t grain = 16;
// Of a tile, if there are enough: what the threads of a block have on their way at a time. The
// blocks work side by side, which memory likes better than far apart.
constexpr std::int64_t tile_bytes = 64 << 10;

// The actions of a program, and the places that they read and write.
struct Rows {
  std::vector<Action> actions;
  std::vector<Place> places;
};

std::int64_t in_bytes(const Plan &plan, std::int64_t elements) {
  return elements * std::int64_t(plan.itemsize);
}

// `stride` is what each value takes in half a window.
Place source_of(const Plan &plan, const Program::Source &source, std::int64_t stride) {
  const auto index = std::size_t(source.index);
  const std::int64_t at = source.home == rows::window  ? source.index * stride
                          : source.home == rows::input ? in_bytes(plan, plan.input_at[index])
                                                       : in_bytes(plan, plan.output_at[index]);
  return {at, source.home, source.rank};
}

void add_action(Rows &made, const Plan &plan, const Program &program,
                const Program::Action &action, std::int64_t stride) {
  constexpr std::int32_t own = -1;
  std::vector<Place> &places = made.places;
  const auto size = [&places] { return std::int32_t(places.size()); };
  const std::int32_t first = size();
  std::int32_t own_source = -1;
  for (auto i = action.first_source; i < action.end_source; ++i) {
    if (program.sources[std::size_t(i)].home != rows::window)
      own_source = i - action.first_source;
    places.push_back(source_of(plan, program.sources[std::size_t(i)], stride));
  }
  const std::int32_t end_source = size();
  if (action.window >= 0)
    places.push_back({action.window * stride, rows::window, own});
  if (action.output >= 0)
    places.push_back(
        {in_bytes(plan, plan.output_at[std::size_t(action.output)]), rows::output, own});
  const auto chunk = std::size_t(action.chunk);
  for (auto i = action.first_delivery; i < action.end_delivery; ++i)
    places.push_back(
        {in_bytes(plan, plan.output_at[chunk]), rows::output,
         program.deliveries[std::size_t(i)]});
  made.actions.push_back({in_bytes(plan, plan.size[chunk]), first, end_source - first,
                          size() - end_source, action.first_wait, action.end_wait, action.completes,
                          action.is_awaited, action.chunk, own_source});
}

Rows rows_of(const Plan &plan, const Program &program, std::int64_t stride) {
  Rows made;
  for (const Program::Action &action : program.actions) {
    if (action.end_source - action.first_source > most_ranks ||
        action.end_delivery - action.first_delivery > most_ranks)
      throw std::invalid_argument("an action has more sources or deliveries than a device "
                                  "can hold: choose another algorithm");
    add_action(made, plan, program, action, stride);
  }
  return made;
}

// Where in the input what an action copies is, if it is that; else -1.
std::int64_t own_input(const Plan &plan, const Program &program,
                       const Program::Action &action) {
  if (action.end_source - action.first_source != 1)
    return -1;
  const Program::Source &only = program.sources[std::size_t(action.first_source)];
  return only.home == rows::input ? in_bytes(plan, plan.input_at[std::size_t(only.index)]) : -1;
}

} // namespace

bool packets_fit(std::int64_t places, std::int64_t piece, std::size_t itemsize, int blocks) {
  if (blocks > packet_blocks)
    return false;
  const std::int64_t bytes = tile_of(piece, itemsize, blocks) * std::int64_t(itemsize);
  return std::max(places, std::int64_t(1)) * bytes * 2 <= packet_bytes; // half is flags
}

std::int64_t tile_of(std::int64_t piece, std::size_t itemsize, int blocks) {
  const std::int64_t per_grain = std::int64_t(grain / itemsize);
  const std::int64_t grains = (piece + per_grain - 1) / per_grain;
  const std::int64_t each = (grains + blocks - 1) / blocks * per_grain;
  return std::min(each, tile_bytes / std::int64_t(itemsize));
}

PackedPlan::PackedPlan(std::shared_ptr<const Plan> plan) : plan_(std::move(plan)) {
  for (std::size_t mode = 0; mode < programs_.size(); ++mode)
    if (plan_->programs[mode])
      programs_[mode] = add(mode, false);
  if (fits_packets(packet_blocks))
    packets_ = add(0, true);
  add_output_chunks();
}

// Where nothing is exposed a rank writes every chunk of its output itself, some of them more
// than once.
void PackedPlan::add_output_chunks() {
  std::map<std::int32_t, OutputChunk> found;
  if (const auto &program = plan_->programs[0])
    for (const Program::Action &action : program->actions)
      if (action.output >= 0)
        found[action.output] = {
            in_bytes(*plan_, plan_->output_at[std::size_t(action.output)]),
            in_bytes(*plan_, plan_->size[std::size_t(action.chunk)]),
            own_input(*plan_, *program, action)};
  std::vector<OutputChunk> chunks;
  for (const auto &[index, chunk] : found)
    chunks.push_back(chunk);
  output_chunks_ = add(chunks);
  num_output_chunks_ = std::int32_t(chunks.size());
}

// Packets are written by the program that exposes nothing, which is run on one piece.
bool PackedPlan::fits_packets(int blocks) const {
  return plan_->programs[0] && plan_->pieces[0] == 1 &&
         packets_fit(plan_->places, plan_->piece[0], plan_->itemsize, blocks);
}

// Where the table begins.
template <class Row> std::uint32_t PackedPlan::add(const std::vector<Row> &table) {
  const std::size_t offset = bytes_.size(), bytes = table.size() * sizeof(Row);
  bytes_.resize(offset + (bytes + grain - 1) / grain * grain);
  if (bytes != 0)
    std::memcpy(bytes_.data() + offset, table.data(), bytes);
  return std::uint32_t(offset);
}

ProgramTables PackedPlan::add(std::size_t mode, bool as_packets) {
  const Program &program = *plan_->programs[mode];
  const std::int64_t piece = in_bytes(*plan_, plan_->piece[mode]);
  ProgramTables made{};
  const Rows rows = rows_of(*plan_, program, as_packets ? 1 : piece);
  const std::uint32_t first = add(rows.actions);
  made.tables = reinterpret_cast<const unsigned char *>(std::uintptr_t(first));
  made.places = add(rows.places) - first;
  if (!as_packets) { // a packet tells by itself that it is there
    made.waits = add(program.waits) - first;
    made.exits = add(program.exits) - first;
    made.readers = add(program.readers) - first;
    made.num_exits = std::int32_t(program.exits.size());
    made.num_readers = std::int32_t(program.readers.size());
  }
  made.bytes = std::uint32_t(bytes_.size()) - first;
  made.num_actions = std::int32_t(program.actions.size());
  made.piece = piece;
  made.pieces = plan_->pieces[mode];
  return made;
}

Launch PackedPlan::launch(const std::byte *base, std::size_t rank, std::size_t n,
                          int blocks) const {
  Launch launch{};
  const auto place = [&](ProgramTables &program, std::size_t mode) {
    program.tables = reinterpret_cast<const unsigned char *>(base) +
                     reinterpret_cast<std::uintptr_t>(program.tables);
    program.tile = std::int32_t(in_bytes(*plan_, tile(mode, blocks)));
  };
  for (std::size_t mode = 0; mode < programs_.size(); ++mode)
    if (plan_->programs[mode]) {
      launch.programs[mode] = programs_[mode];
      place(launch.programs[mode], mode);
    }
  launch.packets = packets_;
  if (packets_.pieces != 0)
    place(launch.packets, 0);
  launch.output_chunks = reinterpret_cast<const OutputChunk *>(base + output_chunks_);
  launch.num_output_chunks = num_output_chunks_;
  launch.fingerprint = plan_->fingerprint;
  const Note &note = plan_->note;
  launch.summary = {note.count, note.content, note.root, note.collective, note.dtype, note.op,
                    0};
  launch.divisor = plan_->divisor;
  // All bits set are not a number in every floating-point type; a truth value has one bit.
  launch.lost_value = DType(note.dtype) == DType::bool_ ? 1 : 0xff;
  launch.rank = std::int32_t(rank);
  launch.n = std::int32_t(n);
  return launch;
}

} // namespace unisono::device
