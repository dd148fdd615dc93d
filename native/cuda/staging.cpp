#include "cuda/staging.hpp"

#include <utility>

#include "cuda/launch_gate.hpp"

namespace unisono::cuda {

namespace {

constexpr Result missing_function = 801; // CUDA_ERROR_NOT_SUPPORTED

} // namespace

Staging::Staging(Device &device, std::shared_ptr<Memory> memory)
    : device_(device), registered_(RegisteredMemory::of(device, std::move(memory))),
      at_(registered_->on(device)) {
  if (api().cuStreamWaitValue32_v2 == nullptr || api().cuStreamWriteValue32_v2 == nullptr)
    throw Error("the driver has no cuStreamWaitValue32_v2, which calls on CUDA arrays between "
                "hosts need: update it to one for CUDA 11.7 or newer",
                missing_function);
  LaunchGate::of_process().add(this, device.ordinal(),
                               [this] { return ended() != begun_.load(); });
}

Staging::~Staging() { LaunchGate::of_process().remove(this); }

std::atomic_ref<std::uint32_t> Staging::word() const {
  return std::atomic_ref(*reinterpret_cast<std::uint32_t *>(registered_->host()));
}

std::uint32_t Staging::begin() {
  const auto gate = LaunchGate::of_process().launching();
  return ++begun_;
}

void Staging::await(Stream stream, std::uint32_t number) {
  const CurrentDevice current(device_);
  UNISONO_CUDA(cuStreamWaitValue32_v2, stream, at_, number, wait_for_at_least);
}

void Staging::end(Stream stream, std::uint32_t number) {
  const CurrentDevice current(device_);
  UNISONO_CUDA(cuStreamWriteValue32_v2, stream, at_, number, 0);
}

void Staging::end_now(std::uint32_t number) { word().store(number, std::memory_order_release); }

std::uint32_t Staging::ended() const { return word().load(std::memory_order_acquire); }

void Staging::to_host(std::size_t offset, Address from, std::size_t bytes, Stream stream) const {
  const CurrentDevice current(device_);
  UNISONO_CUDA(cuMemcpyAsync, at_ + header + offset, from, bytes, stream);
}

void Staging::to_device(Address to, std::size_t offset, std::size_t bytes, Stream stream) const {
  const CurrentDevice current(device_);
  UNISONO_CUDA(cuMemcpyAsync, to, at_ + header + offset, bytes, stream);
}

void Staging::spoil(Address to, std::size_t bytes, Stream stream) const {
  const CurrentDevice current(device_);
  UNISONO_CUDA(cuMemsetD8Async, to, 0xff, bytes, stream);
}

bool Staging::is_capturing(Stream stream) const {
  const CurrentDevice current(device_);
  int status = 0;
  UNISONO_CUDA(cuStreamIsCapturing, stream, &status);
  return status != 0;
}

} // namespace unisono::cuda
