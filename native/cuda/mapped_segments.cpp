#include "cuda/mapped_segments.hpp"

#include <algorithm>
#include <utility>

#include "cuda/deferred_release.hpp"

namespace unisono::cuda {

MappedSegments::MappedSegments(Device &device, std::size_t rank,
                               std::vector<std::size_t> ranks,
                               std::shared_ptr<HostPeers> host_peers, BoardRank *board)
    : device_(device), rank_(rank), ranks_(std::move(ranks)),
      host_peers_(std::move(host_peers)), board_(board),
      addresses_(device, ranks_.size() * device::most_segments * sizeof(Address)),
      mapped_(ranks_.size()), waits_for_(ranks_.size()) {}

unsigned char *const *MappedSegments::table(std::size_t rank) const {
  return addresses_.as<unsigned char *const>(rank * device::most_segments * sizeof(Address));
}

void MappedSegments::update(std::size_t most, CallsMade *calls) {
  const std::unique_lock only(mutex_, std::try_to_lock);
  if (!only)
    return; // another thread is at it
  for (std::size_t q = 0; q < ranks_.size(); ++q) {
    if (q == rank_)
      continue;
    Word &handled = board_[rank_].handled[q];
    const std::uint64_t published = board_[q].published.load(std::memory_order_acquire);
    std::uint64_t next = handled.load(std::memory_order_relaxed);
    const std::uint64_t end = std::min<std::uint64_t>(published, next + most);
    while (next < end && handle(q, board_[q].events[next % most_events], calls))
      handled.store(++next, std::memory_order_release);
  }
  if (calls != nullptr)
    try_again();
}

// False if it cannot be handled yet: the events behind it wait.
bool MappedSegments::handle(std::size_t rank, const SegmentEvent &event, CallsMade *calls) {
  auto &mapped = mapped_[rank];
  switch (event.kind) {
  case SegmentEvent::allocation:
    map_allocation(rank, event);
    return true;
  case SegmentEvent::piece: {
    const auto descriptor = host_peers_->take_descriptor(ranks_[rank], event.descriptor);
    if (descriptor && !map_piece(rank, event, *descriptor))
      refuse(rank, event.segment, true);
    return descriptor != nullptr;
  }
  case SegmentEvent::piece_freed:
    if (!is_unused(rank, calls))
      return false;
    if (const auto found = mapped.find(event.segment);
        found != mapped.end() && found->second.range)
      found->second.range->unmap(event.offset);
    return true;
  case SegmentEvent::freed:
    return unmap(rank, event.segment, calls);
  }
  return true;
}

// Until it is mapped the rank is told that it is refused, so that calls go through windows.
void MappedSegments::map_allocation(std::size_t rank, const SegmentEvent &event) {
  const Result result = try_to_map(rank, event);
  refuse(rank, event.segment, result != success);
  if (result == already_mapped)
    postponed_.push_back({rank, event});
}

Result MappedSegments::try_to_map(std::size_t rank, const SegmentEvent &event) {
  Result result = success;
  auto memory = ImportedMemory::open(device_, event.handle, result);
  if (!memory)
    return result;
  set_address(rank, event.segment, memory->address());
  mapped_[rank][event.segment].allocation = std::move(memory);
  return success;
}

void MappedSegments::try_again() {
  std::erase_if(postponed_, [this](const Postponed &one) {
    const Result result = try_to_map(one.rank, one.event);
    if (result == success)
      refuse(one.rank, one.event.segment, false);
    return result != already_mapped;
  });
}

bool MappedSegments::map_piece(std::size_t rank, const SegmentEvent &event,
                               const Descriptor &descriptor) {
  auto &range = mapped_[rank][event.segment].range;
  if (!range) {
    range = MirroredRange::reserve(device_, event.length);
    if (!range)
      return false;
    set_address(rank, event.segment, range->address());
  }
  return range->map(event.offset, event.bytes, descriptor.number());
}

// To close an allocation the driver waits for kernels, so that is done at another time.
bool MappedSegments::unmap(std::size_t rank, std::uint32_t segment, CallsMade *calls) {
  if (const auto found = mapped_[rank].find(segment); found != mapped_[rank].end()) {
    if (found->second.range && !is_unused(rank, calls))
      return false;
    if (found->second.allocation)
      release_later([memory = std::shared_ptr(std::move(found->second.allocation))]() mutable {
        memory.reset();
      });
    mapped_[rank].erase(found);
  }
  std::erase_if(postponed_, [=](const Postponed &one) {
    return one.rank == rank && one.event.segment == segment;
  });
  refuse(rank, segment, false);
  return true;
}

// Whether no call of this rank uses any more what another one has freed. Calls that are made
// later do not: that rank has none that names it.
bool MappedSegments::is_unused(std::size_t rank, CallsMade *calls) {
  if (calls == nullptr)
    return false;
  std::uint64_t &waits_for = waits_for_[rank];
  if (waits_for == 0)
    waits_for = calls->launched() + 1;
  if (!calls->have_ended(waits_for - 1))
    return false;
  waits_for = 0;
  return true;
}

void MappedSegments::set_address(std::size_t rank, std::uint32_t segment, Address address) {
  addresses_.write((rank * device::most_segments + segment) * sizeof address, &address,
                   sizeof address);
}

void MappedSegments::refuse(std::size_t rank, std::uint32_t segment, bool value) {
  Word &bits = board_[rank_].refused[rank][segment / 64];
  const std::uint64_t bit = std::uint64_t(1) << (segment % 64);
  const std::uint64_t now = bits.load(std::memory_order_relaxed);
  bits.store(value ? now | bit : now & ~bit, std::memory_order_release);
}

} // namespace unisono::cuda
