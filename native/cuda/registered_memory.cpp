#include "cuda/registered_memory.hpp"

#include <map>
#include <mutex>
#include <utility>

#include "cuda/deferred_release.hpp"

namespace unisono::cuda {

std::shared_ptr<RegisteredMemory> RegisteredMemory::of(Device &device,
                                                       std::shared_ptr<Memory> memory) {
  static std::mutex mutex;
  static auto &known = *new std::map<const Memory *, std::weak_ptr<RegisteredMemory>>;
  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto &entry) { return entry.second.expired(); });
  auto &entry = known[memory.get()];
  auto found = entry.lock();
  if (!found) {
    found.reset(new RegisteredMemory(device, std::move(memory)));
    entry = found;
  }
  return found;
}

RegisteredMemory::RegisteredMemory(Device &device, std::shared_ptr<Memory> memory)
    : device_(device), memory_(std::move(memory)) {
  const CurrentDevice current(device);
  UNISONO_CUDA(cuMemHostRegister_v2, memory_->data(), memory_->size(),
               host_mapped | host_portable);
}

RegisteredMemory::~RegisteredMemory() {
  release_later([&device = device_, memory = std::move(memory_)] {
    if (const CurrentDevice current(device, std::nothrow); current)
      (void)api().cuMemHostUnregister(memory->data());
  });
}

Address RegisteredMemory::on(const Device &device) const {
  const CurrentDevice current(device);
  Address address = 0;
  UNISONO_CUDA(cuMemHostGetDevicePointer_v2, &address, memory_->data(), 0);
  return address;
}

} // namespace unisono::cuda
