// The tables of a plan as one block of bytes, which is copied to a device once.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "device/launch.hpp"
#include "engine/program.hpp"

namespace unisono::device {

// Whether the data of a call can travel as packets in so many blocks: windows of so many
// places, each of a piece of so many elements.
bool packets_fit(std::int64_t places, std::int64_t piece, std::size_t itemsize, int blocks);

// Elements of a tile of a piece.
std::int64_t tile_of(std::int64_t piece, std::size_t itemsize, int blocks);

class PackedPlan {
public:
  explicit PackedPlan(std::shared_ptr<const Plan> plan);

  const std::vector<std::byte> &bytes() const { return bytes_; }
  // A launch of this plan by a rank in so many blocks, with tables at `base`, where the bytes
  // were copied to. Buffers and what the communicator has are left to the caller.
  Launch launch(const std::byte *base, std::size_t rank, std::size_t n, int blocks) const;
  // Whether the data of a launch in so many blocks can travel as packets.
  bool fits_packets(int blocks) const;
  const Plan &plan() const { return *plan_; }

private:
  template <class Row> std::uint32_t add(const std::vector<Row> &table);
  ProgramTables add(std::size_t mode, bool as_packets);
  void add_output_chunks();
  std::int64_t tile(std::size_t mode, int blocks) const {
    return tile_of(plan_->piece[mode], plan_->itemsize, blocks);
  }

  std::shared_ptr<const Plan> plan_;
  std::vector<std::byte> bytes_;
  std::array<ProgramTables, 4> programs_{}; // `tables` are offsets
  ProgramTables packets_{};
  std::uint32_t output_chunks_ = 0; // where they begin
  std::int32_t num_output_chunks_ = 0;
};

} // namespace unisono::device
