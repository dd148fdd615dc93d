// Buffers that other processes use in place. A rank shares the allocation that a buffer
// belongs to; the others map it when they next look, and say so. Until all have done it,
// calls on the buffer go through the windows.

#include "cuda/device_comm.hpp"

namespace unisono::cuda {

namespace {

constexpr int pointer_buffer_id = 7; // tells allocations at one address apart

std::uint64_t allocation_id(Address address) {
  std::uint64_t id = 0;
  UNISONO_CUDA(cuPointerGetAttribute, &id, pointer_buffer_id, address);
  return id;
}

} // namespace

// Where the other ranks find a buffer; nothing if not all of them have mapped it.
std::optional<DeviceComm::Place> DeviceComm::place_of(Address address) {
  if (address == 0)
    return Place{0, 0}; // an empty buffer, which no rank reads
  if (one_process_)
    return Place{0, address};
  const Address base = range_of(address).base;
  Known &known = known_[base];
  if (const std::uint64_t id = allocation_id(base); known.id != id)
    known = {id, share(base)};
  if (known.segment == 0 || !is_mapped_by_all(known.segment))
    return {};
  return Place{known.segment, address - base};
}

// The number of a new segment; 0 if the allocation cannot be shared.
std::uint64_t DeviceComm::share(Address base) {
  BoardRank &mine = board_[rank_];
  const std::uint64_t count = mine.shared.load(std::memory_order_relaxed);
  if (count + 1 >= device::most_segments)
    return 0;
  SharedSegment &segment = mine.segments[count];
  if (api().cuIpcGetMemHandle(&segment.handle, base) != success)
    return 0; // of a pool, or of virtual memory
  segment.base = base;
  mine.shared.store(count + 1, std::memory_order_release);
  return count + 1;
}

bool DeviceComm::is_mapped_by_all(std::uint64_t segment) const {
  for (std::size_t q = 0; q < world_ranks_.size(); ++q)
    if (q != rank_ &&
        board_[q].mapped[rank_].load(std::memory_order_acquire) < segment)
      return false;
  return true;
}

// Maps what other ranks have shared since the last time. A segment that cannot be mapped is
// the last one of its rank that is: its calls go through the windows.
void DeviceComm::map_new_segments() {
  const std::unique_lock only(mapping_, std::try_to_lock);
  if (!only)
    return; // another thread is at it
  for (std::size_t q = 0; q < world_ranks_.size() && !one_process_ && !on_host_; ++q) {
    if (q == rank_ || is_unmappable_[q])
      continue;
    Word &mapped = board_[rank_].mapped[q];
    std::uint64_t count = mapped.load(std::memory_order_relaxed);
    const std::uint64_t shared = board_[q].shared.load(std::memory_order_acquire);
    for (; count < shared && count + 1 < device::most_segments; ++count) {
      const SharedSegment &segment = board_[q].segments[count];
      Address address = segment.base;
      if (!is_here_[q]) {
        auto memory = ImportedMemory::open(device_, segment.handle);
        if (!memory) {
          is_unmappable_[q] = true;
          break;
        }
        address = memory->address();
        imported_.push_back(std::move(memory));
      }
      segments_.write((q * device::most_segments + count + 1) * sizeof address, &address,
                      sizeof address);
      mapped.store(count + 1, std::memory_order_release);
    }
  }
}

} // namespace unisono::cuda
