// A table from slots, which are numbers, to indices: open addressing, nothing is removed.

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
    used_ += cell.key != key;
    cell.key = key;
    return cell.value;
  }

  std::int32_t find(std::uint64_t key) const {
    if (cells_.empty())
      return -1;
    const Cell &cell = cells_[position(key)];
    return cell.key == key ? cell.value : -1;
  }

  void clear() {
    if (used_ != 0)
      cells_.assign(cells_.size(), {});
    used_ = 0;
  }

private:
  static constexpr std::uint64_t free = ~std::uint64_t{0};
  struct Cell {
    std::uint64_t key = free;
    std::int32_t value = -1;
  };

  // Where the key is, or would be.
  std::size_t position(std::uint64_t key) const {
    const std::size_t mask = cells_.size() - 1;
    std::size_t at = (key * 0x9e3779b97f4a7c15u) >> (64 - std::countr_zero(cells_.size()));
    while (cells_[at].key != free && cells_[at].key != key)
      at = (at + 1) & mask;
    return at;
  }

  void grow() {
    std::vector<Cell> old(cells_.empty() ? 64 : 2 * cells_.size());
    old.swap(cells_);
    for (const Cell &cell : old)
      if (cell.key != free)
        cells_[position(cell.key)] = cell;
  }

  std::vector<Cell> cells_;
  std::size_t used_ = 0;
};

} // namespace unisono::lowering
