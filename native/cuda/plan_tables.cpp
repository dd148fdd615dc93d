#include "cuda/plan_tables.hpp"

#include <cstring>
#include <utility>

#include "cuda/deferred_release.hpp"

namespace unisono::cuda {

namespace {

constexpr std::size_t grain = 256; // where tables begin

} // namespace

Tables::Tables(std::shared_ptr<TableSlab> slab, std::size_t offset,
               std::span<const std::byte> bytes)
    : slab_(std::move(slab)), offset_(offset), bytes_(bytes.size()) {
  std::memcpy(slab_->host.host<std::byte>() + offset, bytes.data(), bytes.size());
}

Tables::~Tables() {
  release_later([slab = std::move(slab_)] {}); // calls in flight may use it
}

void Tables::copy(Stream stream) const {
  if (copied_)
    return;
  const auto from = reinterpret_cast<Address>(slab_->host.host<std::byte>() + offset_);
  UNISONO_CUDA(cuMemcpyAsync, slab_->device.address() + offset_, from, bytes_, stream);
}

Tables TableMemory::add(std::span<const std::byte> tables) {
  const std::lock_guard lock(mutex_);
  const std::size_t bytes = (tables.size() + grain - 1) / grain * grain;
  const std::shared_ptr<TableSlab> slab = slab_with(bytes);
  const std::size_t offset = std::exchange(slab->used, slab->used + bytes);
  if (slab_->used > slab_bytes / 2 && !next_)
    allocate_next_later();
  return Tables(slab, offset, tables);
}

std::shared_ptr<TableSlab> TableMemory::slab_with(std::size_t bytes) {
  if (bytes > slab_bytes) // one of its own
    return std::make_shared<TableSlab>(device_, bytes);
  if (slab_->used + bytes > slab_bytes)
    slab_ = next_ ? std::exchange(next_, nullptr)
                  : std::make_shared<TableSlab>(device_, slab_bytes);
  return slab_;
}

void TableMemory::allocate_next_later() {
  if (std::exchange(asked_, true))
    return;
  release_later([memory = weak_from_this()] {
    if (const auto alive = memory.lock())
      alive->allocate_next();
  });
}

void TableMemory::allocate_next() {
  std::shared_ptr<TableSlab> made;
  try {
    made = std::make_shared<TableSlab>(device_, slab_bytes);
  } catch (const Error &) {
    // There is no more memory: who needs it next is told so.
  }
  const std::lock_guard lock(mutex_);
  next_ = std::move(made);
  asked_ = false;
}

} // namespace unisono::cuda
