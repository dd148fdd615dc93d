// What the ranks of a device communicator tell each other of buffers that are used in place,
// in memory that their processes share. Every word has one writer.

#pragma once

#include "cuda/api.hpp"
#include "device/launch.hpp"
#include "memory/layout.hpp"

namespace unisono::cuda {

constexpr std::size_t most_events = 64; // of a rank, that not all others have handled

// A rank tells the others of its segments. A segment is a range of its addresses which the
// others see as one: an allocation, or reserved addresses with memory at some of them. Its
// number is used again when all have handled that it was freed.
struct SegmentEvent {
  enum Kind : std::uint32_t {
    allocation = 1, // a segment that is one allocation, by its handle
    piece,          // memory in a segment, by a descriptor; with the first the segment begins
    piece_freed,
    freed, // a segment, with all its memory
  };
  Kind kind;
  std::uint32_t segment;
  std::uint64_t length;        // of the segment, in bytes
  std::uint64_t offset, bytes; // of the piece
  std::uint64_t descriptor;    // by which it was sent: memory/host_peers.hpp
  IpcHandle handle;
};

struct BoardRank {
  // How many events this rank has published: stored with release, after the event.
  alignas(line_size) Word published;
  // Of each rank, how many of its events this rank has handled: stored with release, after
  // this rank's kernels can find the memory, or no longer use it.
  alignas(line_size) Word handled[device::most_ranks];
  // Of each rank, the segments that this rank cannot map, as bits: stored before `handled`.
  alignas(line_size) Word refused[device::most_ranks][device::most_segments / 64];
  // 1: this rank's calls have ended, and it makes no more.
  alignas(line_size) Word closed;
  // Of each rank that has closed, 1: this rank has ended the calls that it took part in.
  alignas(line_size) Word acknowledged[device::most_ranks];
  // 1: this rank has unmapped everything of the others.
  alignas(line_size) Word released;
  SegmentEvent events[most_events]; // the last ones, by their numbers modulo that
};

} // namespace unisono::cuda
