#include "lower/versions.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace unisono::lowering {

Versions::Versions(const Input &input) : input_(input) {
  begin();
  std::int32_t number = 0;
  for (const Step &step : input.steps)
    if (!mixed_names_)
      run(number++, step);
  for (Version &v : all_)
    v.final = v.next_step == none && input.has_output(v.rank, v.slot);
  find_readers();
}

void Versions::begin() {
  for (std::int64_t c = 0; c < input_.num_chunks; ++c)
    if (!input_.before.empty())
      add_given(input_.before[static_cast<std::size_t>(c)], c);
    else
      for (std::int64_t rank = 0; rank < input_.n; ++rank)
        add_given(rank, c);
}

void Versions::add_given(std::int64_t rank, std::int64_t chunk) {
  const auto slot = static_cast<std::int32_t>(chunk);
  now_[key(rank, chunk)] = size();
  all_.push_back({static_cast<std::int32_t>(rank), slot, -1, slot});
  all_.back().origin = size() - 1;
}

void Versions::run(std::int32_t number, const Step &step) {
  group(number, step);
  const Index first = size();
  std::uint32_t begin = 0;
  for (std::size_t g = 0; g < groups_.size(); begin = ends_[g++]) {
    const std::span arriving(arrivals_.data() + begin, ends_[g] - begin);
    const auto where = static_cast<std::int64_t>(groups_[g]);
    if (const Index now = now_.find(groups_[g]); !is_there(arriving, now))
      make(number, where / input_.num_slots, where % input_.num_slots, arriving, now);
  }
  for (Index v = first; v < size(); ++v)
    replace(v);
}

// Sorts the transfers by the slots that they go to, which stay in the order in which they
// first occur; so do the transfers of one slot.
void Versions::group(std::int32_t number, const Step &step) {
  const std::size_t count = step.src.size();
  group_of_.clear(), groups_.clear(), ends_.clear();
  group_at_.resize(count), arrivals_.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    carried(number, step, i);
    std::int32_t &group = group_of_[key(step.dst[i], step.into[i])];
    if (group < 0) {
      group = static_cast<std::int32_t>(groups_.size());
      groups_.push_back(key(step.dst[i], step.into[i]));
      ends_.push_back(0);
    }
    group_at_[i] = static_cast<std::uint32_t>(group);
    ++ends_[group_at_[i]];
  }
  std::exclusive_scan(ends_.begin(), ends_.end(), ends_.begin(), std::uint32_t{0});
  for (std::size_t i = 0; i < count; ++i)
    arrivals_[ends_[group_at_[i]]++] = {carried(number, step, i), step.src[i], step.reduces[i]};
}

// What a transfer carries.
Index Versions::carried(std::int32_t number, const Step &step, std::size_t i) const {
  const auto inside = [](std::int64_t x, std::int64_t end) { return x >= 0 && x < end; };
  if (!inside(step.src[i], input_.n) || !inside(step.dst[i], input_.n) ||
      !inside(step.chunk[i], input_.num_slots) || !inside(step.into[i], input_.num_slots))
    throw std::invalid_argument("a transfer of a schedule is between no ranks or chunks");
  const Index found = now_.find(key(step.src[i], step.chunk[i]));
  if (found == none)
    throw EmptySlot{number, i};
  return found;
}

// Whether what arrives is a copy of what the slot holds anyway.
bool Versions::is_there(std::span<const Arrival> arriving, Index now) const {
  return arriving.size() == 1 && now != none && !arriving[0].reduces &&
         at(arriving[0].version).origin == at(now).origin;
}

void Versions::make(std::int32_t number, std::int64_t rank, std::int64_t slot,
                    std::span<const Arrival> arriving, Index now) {
  const bool adds = std::all_of(arriving.begin(), arriving.end(),
                                [](const Arrival &arrival) { return arrival.reduces; });
  Version made{static_cast<std::int32_t>(rank), static_cast<std::int32_t>(slot), number, 0};
  add_sources(made, arriving, adds ? now : none);
  const auto own = sources(made);
  made.chunk = slot < input_.num_chunks ? made.slot : at(own[0]).chunk;
  made.origin = own.size() == 1 ? at(own[0]).origin : size();
  made.previous = now;
  all_.push_back(made);
}

// The sources in the order of their ranks; `own` is what the slot itself adds, if anything.
void Versions::add_sources(Version &made, std::span<const Arrival> arriving, Index own) {
  operands_.assign(arriving.begin(), arriving.end());
  if (own != none)
    operands_.push_back({own, made.rank, true});
  std::stable_sort(operands_.begin(), operands_.end(),
                   [](const Arrival &a, const Arrival &b) { return a.src < b.src; });
  made.first_source = static_cast<Index>(sources_.size());
  std::int64_t count = 0;
  for (const Arrival &operand : operands_) {
    sources_.push_back(operand.version);
    count += at(operand.version).contributors;
  }
  made.contributors = static_cast<std::int32_t>(std::min(count, input_.n + 1));
  made.end_source = static_cast<Index>(sources_.size());
}

// A step is simultaneous: its versions replace the old ones when all are made.
void Versions::replace(Index made) {
  const Version &v = at(made);
  if (v.previous != none)
    at(v.previous).next_step = v.step;
  now_[key(v.rank, v.slot)] = made;
  for (const Index source : sources(v))
    mixed_names_ |= at(source).chunk != v.chunk;
}

void Versions::find_readers() {
  first_reader_.assign(all_.size() + 1, 0);
  readers_.resize(sources_.size());
  for (const Index source : sources_)
    ++first_reader_[static_cast<std::size_t>(source)];
  std::inclusive_scan(first_reader_.begin(), first_reader_.end(), first_reader_.begin());
  for (Index v = size(); v-- > 0;)
    for (const Index source : sources(at(v))) {
      readers_[static_cast<std::size_t>(--first_reader_[static_cast<std::size_t>(source)])] = v;
      count_reader(at(source), at(v));
    }
}

void Versions::count_reader(Version &v, const Version &reader) {
  if (is_same_slot(v, reader))
    v.at_home = true;
  else
    ++(input_.on_one_host(v.rank, reader.rank) ? v.local_readers : v.remote_readers);
}

} // namespace unisono::lowering
