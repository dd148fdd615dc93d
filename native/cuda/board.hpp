// What the ranks of a device communicator tell each other of buffers that are used in place,
// in memory that their processes share. Every word has one writer.

#pragma once

#include "cuda/api.hpp"
#include "device/launch.hpp"
#include "memory/layout.hpp"

namespace unisono::cuda {

// An allocation of device memory that a rank shares.
struct SharedSegment {
  IpcHandle handle;
  Address base; // in the process of its owner
};

struct BoardRank {
  // How many segments this rank shares: stored with release, after the entry. Segment 0 is
  // not in the table: its offsets are addresses, for ranks of one process.
  alignas(line_size) Word shared;
  // Of each rank, how many of its segments this rank has mapped: stored with release, after
  // this rank's kernels can find them.
  alignas(line_size) Word mapped[device::most_ranks];
  // 1: this rank has unmapped everything of the others.
  alignas(line_size) Word released;
  SharedSegment segments[device::most_segments];
};

} // namespace unisono::cuda
