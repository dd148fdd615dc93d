// Memory for the tables of a communicator's plans.
//
// The first call of a kind needs tables on the device, and when a rank makes it, the kernels of
// other ranks may run that call already and wait for this rank. If those are threads of the
// same process, this rank must not wait for their kernels. But the driver may do that to
// allocate memory, on the device or pinned on the host, and a copy on a stream of its own can be
// queued behind a kernel. So memory is allocated in advance: a slab when the communicator is
// made, and another one when half of it is used, at a time when no call is in flight
// (launch_gate.hpp). And tables are copied on the stream of the call, before its kernel.

#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>

#include "cuda/device.hpp"

namespace unisono::cuda {

// Memory that is given away from its beginning to its end, and released with its last user.
struct TableSlab {
  TableSlab(Device &device, std::size_t bytes) : device(device, bytes), host(device, bytes) {}
  DeviceMemory device;
  PinnedMemory host; // of the same size: what is to be copied
  std::size_t used = 0;
};

// A place in a slab. Tables are on the device after the first call that copies them there.
class Tables {
public:
  Tables(std::shared_ptr<TableSlab> slab, std::size_t offset, std::span<const std::byte> bytes);
  ~Tables(); // calls with it may be in flight, but none in a graph
  Tables(const Tables &) = delete;
  const std::byte *address() const { return slab_->device.as<const std::byte>(offset_); }
  // Copies them on the stream of a call, if no earlier call has; with the device's context.
  void copy(Stream stream) const;
  // The call was launched, and later calls come after it. One that was captured copies them
  // whenever its graph runs, and others cannot rely on that.
  void set_copied() { copied_ = true; }

private:
  std::shared_ptr<TableSlab> slab_;
  std::size_t offset_, bytes_;
  bool copied_ = false;
};

class TableMemory : public std::enable_shared_from_this<TableMemory> {
public:
  static constexpr std::size_t slab_bytes = std::size_t(1) << 20;

  explicit TableMemory(Device &device)
      : device_(device), slab_(std::make_shared<TableSlab>(device, slab_bytes)) {}
  // A copy of tables. Allocates on this thread only if they need more than what was allocated
  // in advance.
  Tables add(std::span<const std::byte> tables);

private:
  std::shared_ptr<TableSlab> slab_with(std::size_t bytes);
  void allocate_next_later();
  void allocate_next();

  Device &device_;
  std::mutex mutex_;
  std::shared_ptr<TableSlab> slab_, next_;
  bool asked_ = false; // for the next one
};

} // namespace unisono::cuda
