// The tables of a plan as one block of bytes, which is copied to a device once.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "device/launch.hpp"
#include "engine/program.hpp"

namespace unisono::device {

class PackedPlan {
public:
  explicit PackedPlan(std::shared_ptr<const Plan> plan);

  const std::vector<std::byte> &bytes() const { return bytes_; }
  // A launch of this plan by a rank in so many blocks, with tables at `base`, where the bytes
  // were copied to. Buffers and what the communicator has are left to the caller.
  Launch launch(const std::byte *base, std::size_t rank, std::size_t n, int blocks) const;
  const Plan &plan() const { return *plan_; }

private:
  template <class Row> std::uint32_t add(const std::vector<Row> &table);
  void add(std::size_t mode);

  std::shared_ptr<const Plan> plan_;
  std::vector<std::byte> bytes_;
  std::array<ProgramTables, 4> programs_{}; // `tables` are offsets
};

} // namespace unisono::device
