#include "device/tables.hpp"

#include <cstring>
#include <stdexcept>

namespace unisono::device {

namespace {

constexpr std::size_t grain = 16;

template <class Row> const Row *at(const std::byte *base, std::size_t offset) {
  return reinterpret_cast<const Row *>(base + offset);
}

} // namespace

PackedPlan::PackedPlan(std::shared_ptr<const Plan> plan) : plan_(std::move(plan)) {
  for (std::size_t mode = 0; mode < programs_.size(); ++mode)
    if (plan_->programs[mode])
      programs_[mode] = add(*plan_->programs[mode]);
  input_at_ = add(plan_->input_at);
  output_at_ = add(plan_->output_at);
  size_ = add(plan_->size);
}

template <class Row> std::size_t PackedPlan::add(const std::vector<Row> &table) {
  const std::size_t offset = bytes_.size(), bytes = table.size() * sizeof(Row);
  bytes_.resize(offset + (bytes + grain - 1) / grain * grain);
  if (bytes != 0)
    std::memcpy(bytes_.data() + offset, table.data(), bytes);
  return offset;
}

PackedPlan::Packed PackedPlan::add(const Program &program) {
  for (const Program::Action &action : program.actions)
    if (action.end_source - action.first_source > most_ranks ||
        action.end_delivery - action.first_delivery > most_ranks)
      throw std::invalid_argument("an action has more sources or deliveries than a device "
                                  "can hold: choose another algorithm");
  return {add(program.actions), add(program.sources),    add(program.waits),
          add(program.exits),   add(program.deliveries), add(program.readers)};
}

Launch PackedPlan::launch(const std::byte *base, std::size_t rank, std::size_t n) const {
  Launch launch{};
  for (std::size_t mode = 0; mode < programs_.size(); ++mode) {
    if (!plan_->programs[mode])
      continue;
    const Program &program = *plan_->programs[mode];
    const Packed &packed = programs_[mode];
    launch.programs[mode] = {at<rows::Action>(base, packed.actions),
                             at<rows::Source>(base, packed.sources),
                             at<rows::Wait>(base, packed.waits),
                             at<rows::Wait>(base, packed.exits),
                             at<std::int32_t>(base, packed.deliveries),
                             at<std::int32_t>(base, packed.readers),
                             std::int32_t(program.actions.size()),
                             std::int32_t(program.exits.size()),
                             std::int32_t(program.readers.size()),
                             program.tail,
                             plan_->piece[mode],
                             plan_->pieces[mode]};
  }
  launch.input_at = at<std::int64_t>(base, input_at_);
  launch.output_at = at<std::int64_t>(base, output_at_);
  launch.size = at<std::int64_t>(base, size_);
  launch.output_bytes = std::int64_t(plan_->output_bytes);
  launch.fingerprint = plan_->fingerprint;
  const Note &note = plan_->note;
  launch.summary = {note.count, note.content, note.root, note.collective, note.dtype, note.op,
                    0};
  launch.itemsize = std::uint32_t(plan_->itemsize);
  launch.divisor = plan_->divisor;
  // All bits set are not a number in every floating-point type; a truth value has one bit.
  launch.lost_value = DType(note.dtype) == DType::bool_ ? 1 : 0xff;
  launch.rank = std::int32_t(rank);
  launch.n = std::int32_t(n);
  return launch;
}

} // namespace unisono::device
