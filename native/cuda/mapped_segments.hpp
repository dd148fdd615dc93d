// Buffers of other ranks that this rank's kernels use in place: what the others share
// (shared_segments.hpp), mapped into this process.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/board.hpp"
#include "cuda/device.hpp"
#include "cuda/mirrored_range.hpp"
#include "memory/host_peers.hpp"

namespace unisono::cuda {

// The calls that a rank has made.
struct CallsMade {
  virtual std::uint64_t launched() const = 0;
  // Whether the first `calls` of them have ended; false if that is not known now.
  virtual bool have_ended(std::uint64_t calls) = 0;

protected:
  ~CallsMade() = default;
};

class MappedSegments {
public:
  // `ranks` are those of the communicator, as numbered in the world.
  MappedSegments(Device &device, std::size_t rank, std::vector<std::size_t> ranks,
                 std::shared_ptr<HostPeers> host_peers, BoardRank *board);

  // Where the kernels of this rank find the segments of another one, by their numbers.
  unsigned char *const *table(std::size_t rank) const;

  // Handles what the others have published since the last time, `most` events of each rank.
  // Memory that is freed is unmapped when the calls that were made before that is known have
  // ended; without `calls` it is left for later.
  void update(std::size_t most, CallsMade *calls);

  // Unmaps everything. There is no update any more.
  void clear() { mapped_.clear(); }

private:
  struct Mapped { // one of both
    std::unique_ptr<ImportedMemory> allocation;
    std::unique_ptr<MirroredRange> range;
  };
  bool handle(std::size_t rank, const SegmentEvent &event, CallsMade *calls);
  void map_allocation(std::size_t rank, const SegmentEvent &event);
  Result try_to_map(std::size_t rank, const SegmentEvent &event);
  void try_again();
  bool map_piece(std::size_t rank, const SegmentEvent &event, const Descriptor &descriptor);
  bool unmap(std::size_t rank, std::uint32_t segment, CallsMade *calls);
  bool is_unused(std::size_t rank, CallsMade *calls);
  void set_address(std::size_t rank, std::uint32_t segment, Address address);
  void refuse(std::size_t rank, std::uint32_t segment, bool value);

  Device &device_;
  const std::size_t rank_;
  const std::vector<std::size_t> ranks_;
  const std::shared_ptr<HostPeers> host_peers_;
  BoardRank *const board_;
  DeviceMemory addresses_; // the tables of all ranks
  std::mutex mutex_;
  std::vector<std::map<std::uint32_t, Mapped>> mapped_; // by rank and segment
  // Allocations that the driver has not mapped yet. It refuses memory that lies where other
  // memory was which this process still has open; that is closed when its owner has told
  // that it is freed, which may be later, and then when no call is in flight.
  struct Postponed {
    std::size_t rank;
    SegmentEvent event;
  };
  std::vector<Postponed> postponed_;
  // By rank: how many calls had been made when it was seen that memory is freed, and one.
  std::vector<std::uint64_t> waits_for_;
};

} // namespace unisono::cuda
