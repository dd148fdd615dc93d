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
  // A launch of this plan by a rank, with tables at `base`, where the bytes were copied to.
  // Buffers and what the communicator has are left to the caller.
  Launch launch(const std::byte *base, std::size_t rank, std::size_t n) const;
  const Plan &plan() const { return *plan_; }

private:
  struct Packed { // offsets of the tables of one program
    std::size_t actions, sources, waits, exits, deliveries, readers;
  };
  template <class Row> std::size_t add(const std::vector<Row> &table);
  Packed add(const Program &program);

  std::shared_ptr<const Plan> plan_;
  std::vector<std::byte> bytes_;
  std::array<Packed, 4> programs_{};
  std::size_t input_at_, output_at_, size_;
};

} // namespace unisono::device
