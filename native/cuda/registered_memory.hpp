// Memory of the host that processes share, and that the devices of this one read and write.

#pragma once

#include <cstddef>
#include <memory>

#include "cuda/device.hpp"
#include "memory/host_peers.hpp"

namespace unisono::cuda {

// A process registers it once: ranks that are threads of the process share that. The
// destructor does not wait for a device: deferred_release.hpp.
class RegisteredMemory {
public:
  // Throws Error if the driver refuses it.
  static std::shared_ptr<RegisteredMemory> of(Device &device, std::shared_ptr<Memory> memory);
  ~RegisteredMemory();
  RegisteredMemory(const RegisteredMemory &) = delete;

  std::byte *host() const { return memory_->data(); }
  Address on(const Device &device) const; // where a device finds it

private:
  RegisteredMemory(Device &device, std::shared_ptr<Memory> memory);

  Device &device_;
  std::shared_ptr<Memory> memory_;
};

} // namespace unisono::cuda
