// Addresses of this process at which memory of another one is mapped piece by piece, as it is
// there: for memory that is made by cuMemCreate.

#pragma once

#include <cstddef>
#include <map>
#include <memory>

#include "cuda/device.hpp"

namespace unisono::cuda {

class MirroredRange {
public:
  // Null if there are no such addresses.
  static std::unique_ptr<MirroredRange> reserve(Device &device, std::size_t bytes);
  ~MirroredRange(); // unmaps everything; no kernel may use it any more
  MirroredRange(const MirroredRange &) = delete;

  Address address() const { return address_; }
  // Maps the memory of a descriptor, which stays the caller's. False if that is not possible.
  bool map(std::size_t offset, std::size_t bytes, int descriptor);
  void unmap(std::size_t offset); // what was mapped there; likewise

private:
  MirroredRange(Device &device, Address address, std::size_t bytes)
      : device_(device), address_(address), bytes_(bytes) {}

  Device &device_;
  const Address address_;
  const std::size_t bytes_;
  std::map<std::size_t, std::size_t> pieces_; // sizes by offset
};

} // namespace unisono::cuda
