#include "cuda/block_cache.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "cuda/deferred_release.hpp"
#include "cuda/device.hpp"

namespace unisono::cuda {

namespace {

constexpr std::size_t smallest = 512;
constexpr std::size_t page = std::size_t(2) << 20; // of the device
constexpr std::size_t most_kept = std::size_t(512) << 20;
constexpr std::size_t most_alike = 16; // of one size

void release(Device &device, Address block) {
  release_later([&device, block] {
    if (const CurrentDevice current(device, std::nothrow); current)
      (void)api().cuMemFree_v2(block);
  });
}

} // namespace

std::size_t BlockCache::rounded(std::size_t bytes) {
  if (bytes <= page)
    return std::max(smallest, std::bit_ceil(bytes));
  return (bytes + page - 1) / page * page;
}

Address BlockCache::take(std::size_t bytes) {
  const std::lock_guard only(mutex_);
  const auto found = blocks_.find(bytes);
  if (found == blocks_.end() || found->second.empty())
    return 0;
  const Address block = found->second.back();
  found->second.pop_back();
  kept_ -= bytes;
  return block;
}

void BlockCache::put(Device &device, Address block, std::size_t bytes) {
  {
    const std::lock_guard only(mutex_);
    std::vector<Address> &same = blocks_[bytes];
    if (kept_ + bytes <= most_kept && same.size() < most_alike) {
      same.push_back(block);
      kept_ += bytes;
      return;
    }
  }
  release(device, block);
}

void BlockCache::release_all(Device &device) {
  std::map<std::size_t, std::vector<Address>> all;
  {
    const std::lock_guard only(mutex_);
    all.swap(blocks_);
    kept_ = 0;
  }
  for (const auto &[bytes, blocks] : all)
    for (const Address block : blocks)
      release(device, block);
  await_releases();
}

} // namespace unisono::cuda
