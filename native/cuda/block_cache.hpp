// Blocks of device memory that were freed, for the next who needs one of the size.
//
// To free memory is dear: it must wait until no collective is in flight (launch_gate.hpp). So
// blocks are kept, up to a limit, and reused; who frees one has seen the end of its use.

#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "cuda/api.hpp"

namespace unisono::cuda {

class Device;

class BlockCache {
public:
  // The size of the block that serves a request.
  static std::size_t rounded(std::size_t bytes);
  // A block of exactly this (rounded) size, or 0.
  Address take(std::size_t bytes);
  // Keeps a block, or releases it where too much is kept already.
  void put(Device &device, Address block, std::size_t bytes);
  // Releases everything that is kept, and waits for it for a while.
  void release_all(Device &device);

private:
  std::mutex mutex_;
  std::map<std::size_t, std::vector<Address>> blocks_; // by size
  std::size_t kept_ = 0;                               // bytes
};

} // namespace unisono::cuda
