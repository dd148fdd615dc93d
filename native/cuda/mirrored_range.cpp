#include "cuda/mirrored_range.hpp"

#include <cstdint>

namespace unisono::cuda {

namespace {

constexpr int read_and_write = 3; // a number of cuda.h

} // namespace

std::unique_ptr<MirroredRange> MirroredRange::reserve(Device &device, std::size_t bytes) {
  const CurrentDevice current(device);
  Address address = 0;
  if (api().cuMemAddressReserve(&address, bytes, 0, 0, 0) != success)
    return nullptr;
  return std::unique_ptr<MirroredRange>(new MirroredRange(device, address, bytes));
}

MirroredRange::~MirroredRange() {
  const CurrentDevice current(device_, std::nothrow);
  if (!current)
    return;
  for (const auto &[offset, bytes] : pieces_)
    (void)api().cuMemUnmap(address_ + offset, bytes);
  (void)api().cuMemAddressFree(address_, bytes_);
}

bool MirroredRange::map(std::size_t offset, std::size_t bytes, int descriptor) {
  if (offset > bytes_ || bytes > bytes_ - offset)
    return false;
  const CurrentDevice current(device_);
  Allocation memory = 0;
  void *const handle = reinterpret_cast<void *>(std::uintptr_t(descriptor));
  if (api().cuMemImportFromShareableHandle(&memory, handle, as_descriptor) != success)
    return false;
  const Address at = address_ + offset;
  const bool is_mapped = api().cuMemMap(at, bytes, 0, memory, 0) == success;
  (void)api().cuMemRelease(memory); // what is mapped stays
  if (!is_mapped)
    return false;
  const AccessDescription access{{on_device, device_.ordinal()}, read_and_write};
  if (api().cuMemSetAccess(at, bytes, &access, 1) != success) {
    (void)api().cuMemUnmap(at, bytes);
    return false;
  }
  pieces_[offset] = bytes;
  return true;
}

void MirroredRange::unmap(std::size_t offset) {
  const auto found = pieces_.find(offset);
  if (found == pieces_.end()) // it could not be mapped
    return;
  if (const CurrentDevice current(device_, std::nothrow); current)
    (void)api().cuMemUnmap(address_ + offset, found->second);
  pieces_.erase(found);
}

} // namespace unisono::cuda
