// Runs one step of a schedule on the verifier's state.
//
// The rules are those of src/unisono/schedule/step.py, and the NumPy twin of this file is
// in src/unisono/schedule/domains.py: everything is read before anything is written; a slot
// takes at most one copy, and any number of reductions after it.
//
// The state holds chunks lo..hi-1 as rows of n ranks. Rows are per chunk, not per rank,
// because a chunk that passes from rank to rank then stays within its own cache lines.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace unisono {

// A two-dimensional view with any strides, zero included: NumPy's broadcast arrays.
template <class T> struct Plane {
  const T *data = nullptr;
  std::int64_t row_stride = 0, column_stride = 0;

  explicit operator bool() const { return data != nullptr; }
  T at(std::size_t row, std::size_t column) const {
    return data[static_cast<std::int64_t>(row) * row_stride +
                static_cast<std::int64_t>(column) * column_stride];
  }
};

// One step's transfers. `into` may be absent (names are kept) and so may `mask` (then all
// transfers reduce, or none does).
struct Transfers {
  std::size_t rows = 0, columns = 0;
  Plane<std::int64_t> src, dst, chunk, into;
  Plane<bool> mask;
  bool all_reduce = false;
};

struct World {
  std::int64_t n, num_slots, lo, hi;
  bool may_rename;
};

// Values are added modulo a prime below 2^62, so that their sum fits.
struct Modular {
  using Value = std::uint64_t;
  std::uint64_t modulus;

  Value add(Value own, Value got) const {
    const Value both = own + got;
    return both >= modulus ? both - modulus : both;
  }
};

// 1 is the original, 0 is anything else; no sum is an original.
struct Presence {
  using Value = std::uint8_t;

  Value add(Value, Value) const { return 0; }
};

template <class Domain> class StepRunner {
public:
  using Value = typename Domain::Value;

  StepRunner(Domain domain, World world, Value *state)
      : domain_(domain), world_(world), state_(state) {}

  // The flat index of a transfer that breaks a rule, or -1.
  std::int64_t run(const Transfers &step) {
    const std::size_t most = step.rows * step.columns;
    if (value_.size() < most) {
      value_.resize(most);
      slot_.resize(most);
      reduces_.resize(most);
    }
    const std::int64_t broken = read(step);
    if (broken >= 0)
      return broken;
    const std::int64_t clash = write(step);
    return clash < 0 ? -1 : flat_index(step, clash);
  }

private:
  // No value of either domain: marks a slot that waits for its copy.
  static constexpr Value kAwaited = Value{1} << (8 * sizeof(Value) - 1);

  bool allowed(std::int64_t src, std::int64_t dst, std::int64_t chunk,
               std::int64_t into) const {
    const auto inside = [](std::int64_t x, std::int64_t end) {
      return static_cast<std::uint64_t>(x) < static_cast<std::uint64_t>(end);
    };
    return inside(src, world_.n) && inside(dst, world_.n) &&
           inside(chunk, world_.num_slots) && inside(into, world_.num_slots) &&
           !(src == dst && chunk == into) && (chunk == into || world_.may_rename);
  }

  bool in_lot(std::int64_t chunk) const { return chunk >= world_.lo && chunk < world_.hi; }

  std::int64_t read(const Transfers &step) {
    std::int64_t index = 0;
    count_ = 0;
    for (std::size_t i = 0; i < step.rows; ++i)
      for (std::size_t j = 0; j < step.columns; ++j, ++index) {
        const std::int64_t src = step.src.at(i, j), dst = step.dst.at(i, j);
        const std::int64_t chunk = step.chunk.at(i, j);
        const std::int64_t into = step.into ? step.into.at(i, j) : chunk;
        if (!allowed(src, dst, chunk, into))
          return index;
        if (!in_lot(chunk))
          continue;
        value_[count_] = state_[(chunk - world_.lo) * world_.n + src];
        slot_[count_] = (into - world_.lo) * world_.n + dst;
        if (step.mask)
          reduces_[count_] = step.mask.at(i, j);
        ++count_;
      }
    return -1;
  }

  // Copies first, as a copy replaces what reductions then add to. The position of a
  // second copy into one slot, or -1.
  std::int64_t write(const Transfers &step) {
    const auto reduces = [&](std::size_t k) {
      return step.mask ? reduces_[k] != 0 : step.all_reduce;
    };
    const bool any_copy = step.mask || !step.all_reduce;
    for (std::size_t k = 0; any_copy && k < count_; ++k)
      if (!reduces(k))
        state_[slot_[k]] = kAwaited;
    for (std::size_t k = 0; any_copy && k < count_; ++k)
      if (!reduces(k)) {
        if (state_[slot_[k]] != kAwaited)
          return static_cast<std::int64_t>(k);
        state_[slot_[k]] = value_[k];
      }
    const bool any_reduction = step.mask || step.all_reduce;
    for (std::size_t k = 0; any_reduction && k < count_; ++k)
      if (reduces(k))
        state_[slot_[k]] = domain_.add(state_[slot_[k]], value_[k]);
    return -1;
  }

  // Which transfer of the step is the k-th of this batch; needed only to report a fault.
  std::int64_t flat_index(const Transfers &step, std::int64_t k) const {
    std::int64_t index = 0;
    for (std::size_t i = 0; i < step.rows; ++i)
      for (std::size_t j = 0; j < step.columns; ++j, ++index)
        if (in_lot(step.chunk.at(i, j)) && k-- == 0)
          return index;
    return index;
  }

  Domain domain_;
  World world_;
  Value *state_;
  std::size_t count_ = 0; // how many of the transfers below are of this batch
  std::vector<Value> value_;
  std::vector<std::int64_t> slot_;
  std::vector<std::uint8_t> reduces_;
};

} // namespace unisono
