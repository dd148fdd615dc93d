// Allocations, their addresses and attributes; copies and memsets.

#include "cuda/emulated_memory.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string>
#include <string_view>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda/emulated_streams.hpp"

namespace unisono::cuda::emulated {

namespace {

constexpr std::string_view file_name = "unisono-emulated-";
constexpr std::string_view link_name = "/memfd:unisono-emulated-";
constexpr std::size_t freed_ranges = 256;

// The same for whatever cannot be had: memory, descriptors, mappings.
Result no_more(int error) {
  switch (error) {
  case ENOMEM:
  case EMFILE:
  case ENFILE:
  case ENOSPC:
  case EFBIG:
  case EINVAL: // ftruncate: longer than a file can be
  case EAGAIN:
    return out_of_memory;
  default:
    return unknown;
  }
}

std::string name_of(int device, bool exportable) {
  return std::string(file_name) + std::to_string(device) + (exportable ? "-shared" : "-own");
}

bool is_on_host(const Block &block) {
  return block.kind == Kind::host || block.kind == Kind::registered;
}

void add_block(MemoryState &memory, void *at, Block block) {
  block.number = ++memory.blocks_made;
  memory.blocks.emplace(Address(at), std::move(block));
}

} // namespace

std::size_t whole_pages(std::size_t bytes) {
  static const std::size_t page = std::size_t(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

void scribble(void *at, std::size_t bytes) {
  std::memset(at, 0xa5, std::min(bytes, std::size_t(1) << 20));
}

std::shared_ptr<Physical> Physical::make(State &state, int device, std::size_t bytes,
                                         bool exportable, Result &why) {
  std::uint64_t &used = state.devices[std::size_t(device)].used;
  const std::size_t whole = whole_pages(bytes);
  why = out_of_memory;
  if (whole < bytes || whole > state.settings.memory - used)
    return nullptr;
  auto made = std::make_shared<Physical>();
  made->fd = ::memfd_create(name_of(device, exportable).c_str(), MFD_CLOEXEC);
  if (made->fd < 0 || ::ftruncate(made->fd, off_t(whole)) != 0) {
    why = no_more(errno);
    return nullptr;
  }
  made->device = device;
  made->bytes = whole;
  made->exportable = exportable;
  used += whole;
  made->counted_ = &used;
  return made;
}

std::shared_ptr<Physical> Physical::adopt(int fd) {
  auto made = std::make_shared<Physical>();
  made->fd = fd;
  char link[64] = {};
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  struct stat found;
  if (::readlink(path.c_str(), link, sizeof(link) - 1) < 0 || ::fstat(fd, &found) != 0)
    return nullptr;
  const std::string_view name = link;
  if (!name.starts_with(link_name))
    return nullptr;
  const char *const number = name.data() + link_name.size();
  const auto [end, error] =
      std::from_chars(number, name.data() + name.size(), made->device);
  if (error != std::errc())
    return nullptr;
  made->exportable = std::string_view(end).starts_with("-shared");
  made->bytes = std::size_t(found.st_size);
  return made;
}

Physical::~Physical() {
  if (fd >= 0)
    ::close(fd);
  if (counted_ != nullptr)
    *counted_ -= bytes;
}

void *map_file(const Physical &physical, std::size_t bytes, int protection, void *at) {
  void *const mapped = ::mmap(at, bytes, protection, MAP_SHARED | (at ? MAP_FIXED : 0),
                              physical.fd, 0);
  if (mapped == MAP_FAILED)
    return nullptr;
  (void)::madvise(mapped, bytes, MADV_DONTFORK); // a child has no device's memory
  return mapped;
}

void unmap_freed(MemoryState &memory, Address address, std::size_t bytes) {
  void *const kept = ::mmap(reinterpret_cast<void *>(address), bytes, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (kept == MAP_FAILED) { // no more mappings: nothing is kept
    ::munmap(reinterpret_cast<void *>(address), bytes);
    return;
  }
  memory.freed.emplace_back(address, bytes);
  if (memory.freed.size() <= freed_ranges)
    return;
  ::munmap(reinterpret_cast<void *>(memory.freed.front().first), memory.freed.front().second);
  memory.freed.pop_front();
}

Blocks::iterator block_of(MemoryState &memory, Address address) {
  auto found = memory.blocks.upper_bound(address);
  if (found == memory.blocks.begin())
    return memory.blocks.end();
  --found;
  return address - found->first < found->second.bytes ? found : memory.blocks.end();
}

Range range_of(MemoryState &memory, Address address, std::size_t bytes) {
  auto block = block_of(memory, address);
  if (block == memory.blocks.end())
    return Range::unknown;
  // Mappings that follow each other are one range.
  Address end = block->first + block->second.bytes;
  while (end - address < bytes && ++block != memory.blocks.end() && block->first == end)
    end += block->second.bytes;
  return end - address < bytes ? Range::wrong : Range::known;
}

bool accessible(State &state, Address address, std::size_t bytes, bool writes) {
  MemoryState &memory = *state.memory;
  auto block = block_of(memory, address);
  if (block == memory.blocks.end())
    return false;
  for (Address at = address; at < address + bytes; at = block->first + block->second.bytes) {
    block = block_of(memory, at);
    if (block == memory.blocks.end())
      return false;
    if (block->second.kind != Kind::mapped)
      continue;
    int flags = 0;
    for (const auto &[device, allowed] : block->second.access)
      flags |= allowed;
    if ((flags & (writes ? 2 : 1)) == 0)
      return false;
  }
  return true;
}

bool reachable(State &state, int device, Address address) {
  const auto block = block_of(*state.memory, address);
  return state.settings.peers || block == state.memory->blocks.end() ||
         block->second.physical == nullptr || block->second.physical->device == device;
}

void free_memory_of(State &state, int device) {
  MemoryState &memory = *state.memory;
  std::erase_if(memory.blocks, [&](const auto &entry) {
    const Block &block = entry.second;
    const bool freed = block.device == device && block.kind != Kind::mapped;
    if (freed && block.kind != Kind::registered)
      unmap_freed(memory, entry.first, block.mapped);
    return freed;
  });
}

Result cuMemAlloc_v2(Address *address, std::size_t bytes) {
  return with_context([&](Entry &at) -> Result {
    if (address == nullptr || bytes == 0)
      return invalid_value;
    if (const Result refused = at.state.streams->refuse_unsafe())
      return refused;
    if (const Result failed = at.state.streams->wait_where_allowed(at.lock, at.device))
      return failed;
    Result why = success;
    const auto physical = Physical::make(at.state, at.device, bytes, false, why);
    if (physical == nullptr)
      return why;
    void *const mapped = map_file(*physical, physical->bytes, PROT_READ | PROT_WRITE);
    if (mapped == nullptr)
      return no_more(errno);
    scribble(mapped, bytes);
    add_block(*at.state.memory, mapped,
              {Kind::device, at.device, bytes, physical->bytes, 0, physical, 1, {}});
    *address = Address(mapped);
    return success;
  });
}

namespace {

// As CUDA does, frees memory when all work of the device has ended that may use it, and until
// then nothing can be launched.
Result free_block(Entry &at, Address address, Kind kind) {
  MemoryState &memory = *at.state.memory;
  const auto found = memory.blocks.find(address);
  if (found == memory.blocks.end() || found->second.kind != kind)
    return invalid_value;
  if (const Result refused = at.state.streams->refuse_unsafe())
    return refused;
  if (const Result failed = at.state.streams->wait_for_kernels(at.lock, found->second.device))
    return failed;
  const auto still = memory.blocks.find(address); // another thread may have freed it
  if (still == memory.blocks.end() || still->second.kind != kind)
    return invalid_value;
  unmap_freed(memory, address, still->second.mapped);
  memory.blocks.erase(still);
  return success;
}

} // namespace

Result cuMemFree_v2(Address address) {
  return with_context([&](Entry &at) -> Result {
    return address == 0 ? success : free_block(at, address, Kind::device);
  });
}

Result cuMemHostAlloc(void **host, std::size_t bytes, unsigned flags) {
  return with_context([&](Entry &at) -> Result {
    if (host == nullptr || bytes == 0 || (flags & ~7u) != 0)
      return invalid_value;
    if (const Result refused = at.state.streams->refuse_unsafe())
      return refused;
    if (const Result failed = at.state.streams->wait_where_allowed(at.lock, at.device))
      return failed;
    const std::size_t whole = whole_pages(bytes);
    void *const mapped =
        whole < bytes ? MAP_FAILED
                      : ::mmap(nullptr, whole, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED)
      return whole < bytes ? Result(out_of_memory) : no_more(errno);
    (void)::madvise(mapped, whole, MADV_DONTFORK); // as with the driver's
    scribble(mapped, bytes);
    add_block(*at.state.memory, mapped,
              {Kind::host, at.device, bytes, whole, 0, nullptr, 1, {}});
    *host = mapped;
    return success;
  });
}

Result cuMemFreeHost(void *host) {
  return with_context(
      [&](Entry &at) -> Result { return free_block(at, Address(host), Kind::host); });
}

// The pages stay where they are: a device of the emulation reaches all memory.
Result cuMemHostRegister_v2(void *host, std::size_t bytes, unsigned flags) {
  return with_context([&](Entry &at) -> Result {
    MemoryState &memory = *at.state.memory;
    const Address first = Address(host);
    if (host == nullptr || bytes == 0 || first + bytes < first || (flags & ~3u) != 0)
      return invalid_value;
    if (const Result refused = at.state.streams->refuse_unsafe())
      return refused;
    const auto next = memory.blocks.lower_bound(first);
    if (block_of(memory, first) != memory.blocks.end() ||
        (next != memory.blocks.end() && next->first < first + bytes))
      return host_memory_already_registered;
    add_block(memory, host, {Kind::registered, at.device, bytes, bytes, 0, nullptr, 1, {}});
    return success;
  });
}

Result cuMemHostUnregister(void *host) {
  return with_context([&](Entry &at) -> Result {
    MemoryState &memory = *at.state.memory;
    const auto found = memory.blocks.find(Address(host));
    if (found == memory.blocks.end() || found->second.kind != Kind::registered)
      return host_memory_not_registered;
    if (const Result refused = at.state.streams->refuse_unsafe())
      return refused;
    const std::uint64_t number = found->second.number;
    if (const Result failed = at.state.streams->wait_for_kernels(at.lock, at.device))
      return failed;
    const auto still = memory.blocks.find(Address(host)); // as with free_block
    if (still == memory.blocks.end() || still->second.number != number)
      return host_memory_not_registered;
    memory.blocks.erase(still);
    return success;
  });
}

Result cuMemHostGetDevicePointer_v2(Address *address, void *host, unsigned flags) {
  return with_context([&](Entry &at) -> Result {
    const auto found = block_of(*at.state.memory, Address(host));
    if (flags != 0 || found == at.state.memory->blocks.end() || !is_on_host(found->second))
      return invalid_value;
    *address = Address(host);
    return success;
  });
}

namespace {

template <class Value> Result answer(void *into, Value value) {
  std::memcpy(into, &value, sizeof(value));
  return success;
}

// The reserved addresses around a mapping; of other memory its own.
std::pair<Address, std::size_t> addresses_around(const MemoryState &memory,
                                                 const Blocks::value_type &entry) {
  if (entry.second.kind != Kind::mapped)
    return {entry.first, entry.second.bytes};
  return *std::prev(memory.reserved.upper_bound(entry.first));
}

Result attribute_of(const MemoryState &memory, const Blocks::value_type &entry, int attribute,
                    Address address, void *value) {
  const Block &block = entry.second;
  const bool on_host = is_on_host(block);
  switch (attribute) {
  case pointer_context: return answer(value, std::uintptr_t(block.device) + 1);
  case pointer_memory_type: return answer(value, on_host ? memory_host : memory_device);
  case 3: return answer(value, address); // device pointer
  case 4:                                // host pointer
    return on_host ? answer(value, address) : Result(invalid_value);
  case 7: return answer(value, block.number); // buffer id
  case 8: return answer(value, 0);            // managed
  case pointer_device: return answer(value, block.device);
  case pointer_ipc_capable: return answer(value, int(block.kind == Kind::device));
  case 11: return answer(value, addresses_around(memory, entry).first); // range
  case 12: return answer(value, addresses_around(memory, entry).second);
  case 13: return answer(value, 1); // mapped
  case 14:                          // kinds of handles that can be exported
    return answer(value, std::uint64_t(block.kind == Kind::mapped && block.physical->exportable));
  default: return invalid_value;
  }
}

} // namespace

Result cuPointerGetAttribute(void *value, int attribute, Address address) {
  return with_context([&](Entry &at) -> Result {
    const auto found = block_of(*at.state.memory, address);
    if (value == nullptr || found == at.state.memory->blocks.end())
      return invalid_value;
    return attribute_of(*at.state.memory, *found, attribute, address, value);
  });
}

Result cuMemGetAddressRange_v2(Address *base, std::size_t *bytes, Address address) {
  return with_context([&](Entry &at) -> Result {
    const auto found = block_of(*at.state.memory, address);
    if (found == at.state.memory->blocks.end())
      return not_found;
    if (base != nullptr)
      *base = found->first;
    if (bytes != nullptr)
      *bytes = found->second.bytes;
    return success;
  });
}

} // namespace unisono::cuda::emulated
