// Virtual memory management: physical memory, addresses, and the mapping of one to the other.

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda/emulated_memory.hpp"
#include "cuda/emulated_streams.hpp"

namespace unisono::cuda::emulated {

namespace {

constexpr int pinned = 1; // a number of cuda.h

bool whole_grains(std::uint64_t bytes) { return bytes != 0 && bytes % granularity == 0; }

Result check_properties(const State &state, const AllocationProperties *properties) {
  if (properties == nullptr || properties->type != pinned ||
      properties->location.type != on_device)
    return invalid_value;
  if (!is_device(state, properties->location.id))
    return invalid_device;
  const bool supported = properties->handle_type == 0 || properties->handle_type == as_descriptor;
  return supported ? success : Result(not_supported);
}

void *address_pointer(Address address) { return reinterpret_cast<void *>(address); }

bool reserve_at(void *at, std::size_t bytes) {
  return ::mmap(at, bytes, PROT_NONE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0), -1,
                0) != MAP_FAILED;
}

// Addresses at a multiple of the granularity: more than that are mapped, and the rest unmapped.
Address reserve(std::size_t bytes) {
  const std::size_t more = bytes + granularity;
  void *const found = more < bytes ? MAP_FAILED
                                   : ::mmap(nullptr, more, PROT_NONE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED)
    return 0;
  const Address first = Address(found);
  const Address begin = (first + granularity - 1) / granularity * granularity;
  if (begin != first)
    ::munmap(found, begin - first);
  if (begin - first != granularity)
    ::munmap(address_pointer(begin + bytes), granularity - (begin - first));
  return begin;
}

bool is_reserved(const MemoryState &memory, Address address, std::size_t bytes) {
  auto found = memory.reserved.upper_bound(address);
  if (found == memory.reserved.begin())
    return false;
  --found;
  const Address end = found->first + found->second;
  return address < end && bytes <= end - address;
}

// The mappings that a range consists of; empty if it is anything else.
std::vector<Blocks::iterator> mappings_of(MemoryState &memory, Address address,
                                          std::size_t bytes) {
  std::vector<Blocks::iterator> found;
  Address end = address;
  while (end < address + bytes) {
    const auto block = memory.blocks.find(end);
    if (block == memory.blocks.end() || block->second.kind != Kind::mapped ||
        block->second.bytes > address + bytes - end)
      return {};
    found.push_back(block);
    end += block->second.bytes;
  }
  return found;
}

bool has_mappings(MemoryState &memory, Address address, std::size_t bytes) {
  const auto next = memory.blocks.lower_bound(address);
  return block_of(memory, address) != memory.blocks.end() ||
         (next != memory.blocks.end() && next->first < address + bytes);
}

Result check_access(const State &state, const Block &block, const AccessDescription &wanted) {
  if (wanted.location.type != on_device ||
      (wanted.flags != 0 && wanted.flags != 1 && wanted.flags != 3))
    return invalid_value;
  if (!is_device(state, wanted.location.id))
    return invalid_device;
  const bool reaches = wanted.location.id == block.physical->device || state.settings.peers;
  return reaches ? success : Result(peer_access_unsupported);
}

// One address space for all devices: a mapping allows what it allows to any of them.
Result protect(Address address, const Block &block) {
  int flags = 0;
  for (const auto &[device, allowed] : block.access)
    flags |= allowed;
  const int protection = (flags & 1 ? PROT_READ : 0) | (flags & 2 ? PROT_WRITE : 0);
  return ::mprotect(address_pointer(address), block.bytes, protection) == 0
             ? success
             : Result(map_failed);
}

} // namespace

Result cuMemGetAllocationGranularity(std::size_t *bytes, const AllocationProperties *properties,
                                     int option) {
  return with_driver([&](Entry &at) -> Result {
    if (const Result wrong = check_properties(at.state, properties))
      return wrong;
    if (option != 0 && option != 1)
      return invalid_value;
    *bytes = granularity;
    return success;
  });
}

Result cuMemCreate(Allocation *allocation, std::size_t bytes,
                   const AllocationProperties *properties, unsigned long long flags) {
  return with_context([&](Entry &at) -> Result {
    if (const Result wrong = check_properties(at.state, properties))
      return wrong;
    if (allocation == nullptr || flags != 0 || !whole_grains(bytes))
      return invalid_value;
    Result why = success;
    auto made = Physical::make(at.state, properties->location.id, bytes,
                               properties->handle_type == as_descriptor, why);
    if (made == nullptr)
      return why;
    void *const mapped = map_file(*made, bytes, PROT_READ | PROT_WRITE);
    if (mapped == nullptr)
      return out_of_memory;
    scribble(mapped, bytes);
    ::munmap(mapped, bytes);
    *allocation = at.state.memory->handles.add(std::move(made));
    return success;
  });
}

// The memory lives on while it is mapped, or another handle of it is there.
Result cuMemRelease(Allocation allocation) {
  return with_driver([&](Entry &at) -> Result {
    const bool found = at.state.memory->handles.take(allocation) != nullptr;
    return found ? success : Result(invalid_value);
  });
}

Result cuMemRetainAllocationHandle(Allocation *allocation, void *address) {
  return with_driver([&](Entry &at) -> Result {
    MemoryState &memory = *at.state.memory;
    const auto found = block_of(memory, Address(address));
    if (found == memory.blocks.end() || found->second.kind != Kind::mapped)
      return invalid_value;
    *allocation = memory.handles.add(found->second.physical);
    return success;
  });
}

Result cuMemExportToShareableHandle(void *handle, Allocation allocation, int handle_type,
                                    unsigned long long flags) {
  return with_driver([&](Entry &at) -> Result {
    const auto physical = at.state.memory->handles.find(allocation);
    if (handle == nullptr || physical == nullptr || handle_type != as_descriptor || flags != 0 ||
        !physical->exportable)
      return invalid_value;
    const int fd = ::fcntl(physical->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) // no more descriptors
      return errno == EMFILE ? Result(out_of_memory) : Result(unknown);
    std::memcpy(handle, &fd, sizeof(fd));
    return success;
  });
}

// The descriptor stays the caller's.
Result cuMemImportFromShareableHandle(Allocation *allocation, void *handle, int handle_type) {
  return with_context([&](Entry &at) -> Result {
    if (allocation == nullptr || handle_type != as_descriptor)
      return invalid_value;
    const int given = int(reinterpret_cast<std::uintptr_t>(handle));
    const int fd = ::fcntl(given, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
      return errno == EMFILE ? Result(out_of_memory) : Result(invalid_value);
    auto physical = Physical::adopt(fd);
    if (physical == nullptr || !physical->exportable || !whole_grains(physical->bytes))
      return invalid_value;
    *allocation = at.state.memory->handles.add(std::move(physical));
    return success;
  });
}

Result cuMemAddressReserve(Address *address, std::size_t bytes, std::size_t alignment,
                           Address, unsigned long long flags) {
  return with_driver([&](Entry &at) -> Result {
    if (address == nullptr || !whole_grains(bytes) || flags != 0 ||
        (alignment & (alignment - 1)) != 0 || alignment > granularity)
      return invalid_value;
    const Address found = reserve(bytes);
    if (found == 0)
      return out_of_memory;
    at.state.memory->reserved[found] = bytes;
    *address = found;
    return success;
  });
}

Result cuMemAddressFree(Address address, std::size_t bytes) {
  return with_driver([&](Entry &at) -> Result {
    MemoryState &memory = *at.state.memory;
    const auto found = memory.reserved.find(address);
    if (found == memory.reserved.end() || found->second != bytes ||
        has_mappings(memory, address, bytes))
      return invalid_value;
    memory.reserved.erase(found);
    unmap_freed(memory, address, bytes);
    return success;
  });
}

Result cuMemMap(Address address, std::size_t bytes, std::size_t offset, Allocation allocation,
                unsigned long long flags) {
  return with_driver([&](Entry &at) -> Result {
    MemoryState &memory = *at.state.memory;
    const auto physical = memory.handles.find(allocation);
    if (physical == nullptr || offset != 0 || flags != 0 || !whole_grains(bytes) ||
        bytes > physical->bytes || address % granularity != 0 ||
        !is_reserved(memory, address, bytes) || has_mappings(memory, address, bytes))
      return invalid_value;
    if (map_file(*physical, bytes, PROT_NONE, address_pointer(address)) == nullptr)
      return map_failed;
    memory.blocks.emplace(address, Block{Kind::mapped, physical->device, bytes, bytes,
                                         ++memory.blocks_made, physical});
    return success;
  });
}

Result cuMemUnmap(Address address, std::size_t bytes) {
  return with_driver([&](Entry &at) -> Result {
    MemoryState &memory = *at.state.memory;
    const auto mappings = mappings_of(memory, address, bytes);
    if (mappings.empty())
      return invalid_value;
    for (const auto &mapping : mappings) {
      if (!reserve_at(address_pointer(mapping->first), mapping->second.bytes))
        return map_failed;
      memory.blocks.erase(mapping);
    }
    return success;
  });
}

Result cuMemSetAccess(Address address, std::size_t bytes, const AccessDescription *wanted,
                      std::size_t count) {
  return with_driver([&](Entry &at) -> Result {
    const auto mappings = mappings_of(*at.state.memory, address, bytes);
    if (mappings.empty() || wanted == nullptr || count == 0)
      return invalid_value;
    for (const auto &mapping : mappings)
      for (std::size_t i = 0; i < count; ++i)
        if (const Result wrong = check_access(at.state, mapping->second, wanted[i]))
          return wrong;
    for (const auto &mapping : mappings) {
      for (std::size_t i = 0; i < count; ++i)
        mapping->second.access[wanted[i].location.id] = wanted[i].flags;
      if (const Result failed = protect(mapping->first, mapping->second))
        return failed;
    }
    return success;
  });
}

} // namespace unisono::cuda::emulated
