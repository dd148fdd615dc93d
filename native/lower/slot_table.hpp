// A table from slots, which are numbers, to indices: open addressing, nothing is removed but
// all at once.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace unisono::lowering {

class SlotTable {
public:
  // What is stored under the key; -1 at first.
  std::int32_t &operator[](std::uint64_t key) {
    if (2 * (used_ + 1) > cells_.size())
      grow();
    Cell &cell = cells_[position(key)];
    if (is_free(cell)) {
      cell = {key, -1, round_};
      ++used_;
    }
    return cell.value;
  }

  std::int32_t find(std::uint64_t key) const {
    if (cells_.empty())
      return -1;
    const Cell &cell = cells_[position(key)];
    return is_free(cell) ? -1 : cell.value;
  }

  // Touches no cell, so that a large step does not make all later ones slow.
  void clear() {
    ++round_;
    used_ = 0;
  }

private:
  // In use if it was filled since the table was cleared last. Steps are counted in 31 bits.
  struct Cell {
    std::uint64_t key = 0;
    std::int32_t value = -1;
    std::uint32_t round = 0;
  };

  bool is_free(const Cell &cell) const { return cell.round != round_; }

  // Where the key is, or would be.
  std::size_t position(std::uint64_t key) const {
    const std::size_t mask = cells_.size() - 1;
    std::size_t at = (key * 0x9e3779b97f4a7c15u) >> (64 - std::countr_zero(cells_.size()));
    while (!is_free(cells_[at]) && cells_[at].key != key)
      at = (at + 1) & mask;
    return at;
  }

  void grow() {
    std::vector<Cell> old(cells_.empty() ? 64 : 2 * cells_.size());
    old.swap(cells_);
    for (const Cell &cell : old)
      if (!is_free(cell))
        cells_[position(cell.key)] = cell;
  }

  std::vector<Cell> cells_;
  std::size_t used_ = 0;
  std::uint32_t round_ = 1;
};

} // namespace unisono::lowering
