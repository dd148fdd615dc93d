// Every value that every slot of a schedule ever has, and who reads it. What is said in
// src/unisono/schedule/versions.py holds here, and the numbers are equal; a version is an
// index here, in the order in which they are made.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lower/slot_table.hpp"

namespace unisono::lowering {

// The transfers of one step, in their order.
struct Step {
  std::span<const std::int64_t> src, dst, chunk, into;
  std::span<const bool> reduces;
};

// A schedule. `before` and `after` are the ranks that hold each chunk; empty: all do.
// Chunks from `num_chunks` on are temporaries. `hosts` is the host of every rank.
struct Input {
  std::int64_t n = 0, num_chunks = 0, num_slots = 0;
  std::span<const std::int64_t> before, after, hosts;
  std::vector<Step> steps;

  bool has_output(std::int64_t rank, std::int64_t slot) const {
    return slot < num_chunks &&
           (after.empty() || after[static_cast<std::size_t>(slot)] == rank);
  }
  bool on_one_host(std::int64_t a, std::int64_t b) const {
    return hosts[static_cast<std::size_t>(a)] == hosts[static_cast<std::size_t>(b)];
  }
};

using Index = std::int32_t;
inline constexpr Index none = -1;

// The fields are those of `Version` in versions.py. Sources and readers are stored apart.
struct Version {
  std::int32_t rank, slot, step, chunk;
  std::int32_t contributors = 1; // at most n + 1: more ranks than there are
  Index first_source = 0, end_source = 0;
  Index origin = none;   // the input or the sum that this is a copy of
  Index previous = none; // what its slot had before
  std::int32_t next_step = none;
  std::int32_t local_readers = 0, remote_readers = 0; // how many
  std::int32_t window = none, action = none;
  bool at_home = false, final = false, output = false, delivered = false, delivers = false;

  bool given() const { return step < 0; }
  std::int32_t num_sources() const { return end_source - first_source; }
};

// Thrown if a step reads a slot that has nothing: which of its transfers does.
struct EmptySlot {
  std::int32_t step;
  std::size_t transfer;
};

class Versions {
public:
  // Throws EmptySlot, or std::invalid_argument for a transfer between no ranks or chunks.
  explicit Versions(const Input &input);

  const Input &input() const { return input_; }
  Version &at(Index v) { return all_[static_cast<std::size_t>(v)]; }
  const Version &at(Index v) const { return all_[static_cast<std::size_t>(v)]; }
  Index size() const { return static_cast<Index>(all_.size()); }

  std::span<const Index> sources(const Version &v) const {
    return span_of(sources_, v.first_source, v.end_source);
  }
  // Those that read v, its own slot's included. A reader to which v is delivered is one
  // of them; `Version::local_readers` does not count it.
  std::span<const Index> readers(Index v) const {
    const auto at = static_cast<std::size_t>(v);
    return span_of(readers_, first_reader_[at], first_reader_[at + 1]);
  }
  bool is_same_slot(const Version &a, const Version &b) const {
    return a.rank == b.rank && a.slot == b.slot;
  }
  // Whether `reader`, which is one, is another rank on the host, and fetches v itself; or
  // another chunk of the same rank.
  bool reads_here(const Version &v, const Version &reader) const {
    return !is_same_slot(v, reader) && !reader.delivered &&
           input_.on_one_host(v.rank, reader.rank);
  }
  bool reads_from_other_host(const Version &v, const Version &reader) const {
    return !input_.on_one_host(v.rank, reader.rank);
  }
  // The last version of a slot, or none.
  Index latest(std::int32_t rank, std::int32_t slot) const { return now_.find(key(rank, slot)); }
  // Whether some step adds chunks of different names, which need not have one size. Later
  // steps are not looked at then.
  bool has_mixed_names() const { return mixed_names_; }

private:
  struct Arrival {
    Index version;
    std::int64_t src;
    bool reduces;
  };

  static std::span<const Index> span_of(const std::vector<Index> &all, Index first, Index end) {
    return {all.data() + first, static_cast<std::size_t>(end - first)};
  }
  std::uint64_t key(std::int64_t rank, std::int64_t slot) const {
    return static_cast<std::uint64_t>(rank * input_.num_slots + slot);
  }
  void begin();
  void add_given(std::int64_t rank, std::int64_t chunk);
  void run(std::int32_t number, const Step &step);
  void group(std::int32_t number, const Step &step);
  Index carried(std::int32_t number, const Step &step, std::size_t i) const;
  bool is_there(std::span<const Arrival> arriving, Index now) const;
  void make(std::int32_t number, std::int64_t rank, std::int64_t slot,
            std::span<const Arrival> arriving, Index now);
  void add_sources(Version &made, std::span<const Arrival> arriving, Index own);
  void replace(Index made);
  void find_readers();
  void count_reader(Version &v, const Version &reader);

  const Input &input_;
  std::vector<Version> all_;
  std::vector<Index> sources_, readers_, first_reader_;
  SlotTable now_, group_of_;
  std::vector<std::uint64_t> groups_;          // of a step: the slots, as they first occur
  std::vector<std::uint32_t> group_at_, ends_; // of each transfer, and where groups end
  std::vector<Arrival> arrivals_, operands_;
  bool mixed_names_ = false;
};

} // namespace unisono::lowering
