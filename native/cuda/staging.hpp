// What a call between hosts needs of a device: memory of the host that the device copies from and
// to, and a word that streams wait for.
//
// Calls are numbered from 1. The stream of a call waits until the word has reached its number; a
// thread of the host lets a stream of its own set the word behind the last copy of the call. So
// the host that makes a call does not wait, and nothing but the word ties the two together.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "cuda/device.hpp"
#include "cuda/registered_memory.hpp"

namespace unisono::cuda {

class Staging {
public:
  // The word is in the first bytes of the memory, which are zeros.
  Staging(Device &device, std::shared_ptr<Memory> memory);
  ~Staging();
  Staging(const Staging &) = delete;

  static constexpr std::size_t header = 4096; // bytes before those for data
  std::byte *host() const { return registered_->host() + header; }

  // A new call: its number.
  std::uint32_t begin();
  // Lets what is launched on the stream from now on wait for the end of a call.
  void await(Stream stream, std::uint32_t number);
  // Ends a call behind what is on the stream now; or at once, if the driver fails.
  void end(Stream stream, std::uint32_t number);
  void end_now(std::uint32_t number);
  // The last call that has ended.
  std::uint32_t ended() const;

  // Between the device's memory and that of the host, in the order of the stream.
  void to_host(std::size_t offset, Address from, std::size_t bytes, Stream stream) const;
  void to_device(Address to, std::size_t offset, std::size_t bytes, Stream stream) const;
  // Fills memory of the device with bytes that are not a number.
  void spoil(Address to, std::size_t bytes, Stream stream) const;
  // Whether a stream is being captured for a graph.
  bool is_capturing(Stream stream) const;

private:
  std::atomic_ref<std::uint32_t> word() const;

  Device &device_;
  std::shared_ptr<RegisteredMemory> registered_;
  Address at_; // where the device finds it
  std::atomic<std::uint32_t> begun_ = 0;
};

} // namespace unisono::cuda
