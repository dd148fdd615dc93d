// A CUDA device of this process, and memory on it.

#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "cuda/api.hpp"
#include "cuda/block_cache.hpp"

namespace unisono::cuda {

// One device, with its primary context, which torch and CuPy use as well. It is kept for the
// life of the process.
class Device {
public:
  static Device &of(int ordinal);
  static int count();
  // Of each device, whether it can access the memory of each; makes no context.
  static std::vector<std::vector<bool>> access();

  int ordinal() const { return ordinal_; }
  Context context() const { return context_; }
  const std::string &name() const { return name_; }
  const Uuid &uuid() const { return uuid_; }
  int capability() const { return capability_; } // 90 is 9.0
  int multiprocessors() const { return multiprocessors_; }
  std::size_t memory() const { return memory_; }
  // Whether processes share it through MPS; otherwise their kernels take turns.
  bool has_mps() const { return has_mps_; }
  // Whether kernels of this device can access memory of another one; of one that this process
  // does not see that is not known, and taken for true.
  bool can_access(const Device &peer) const { return can_access(peer.uuid_); }
  bool can_access(const Uuid &peer) const;
  // Lets them; throws Error if they cannot.
  void enable_access(const Device &peer);
  // Copies to the device, and returns when it is done. Not on the default stream, where it
  // would wait for kernels, which may wait for other ranks.
  void write(Address to, const void *from, std::size_t bytes);
  void read(void *to, Address from, std::size_t bytes); // likewise
  void clear(Address to, std::size_t bytes);
  BlockCache &freed() { return freed_; }

  Device(const Device &) = delete;
  explicit Device(int ordinal);
  // Of one whose constructor has failed: the others are never destroyed.
  ~Device();

private:
  struct Empty {};
  Device(int ordinal, Empty) : ordinal_(ordinal) {}
  void copy(Address to, Address from, std::size_t bytes);

  DeviceNumber number_ = 0;
  int ordinal_;
  Context context_ = nullptr;
  std::string name_;
  Uuid uuid_{};
  int capability_ = 0, multiprocessors_ = 0;
  std::size_t memory_ = 0;
  bool has_mps_ = false;
  std::mutex copying_;
  Stream copies_ = nullptr;
  BlockCache freed_;
};

// Lets this thread make calls of the driver that a capture forbids, for a while. As long as a
// thread of the process captures a stream in the global mode, torch's default, others may
// neither allocate nor free, nor ask for an event: such a call fails, and the capture with it.
// What unisono does besides launching is no part of a graph, so it is done in relaxed mode,
// on the capturing thread too. A launch is captured in any mode.
class RelaxedCapture {
public:
  RelaxedCapture() noexcept;
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture &) = delete;

private:
  int before_;
};

// Makes the context of a device the current one of this thread, for a while, and lifts what
// captures forbid: all calls of the driver that need a context are made under this.
class CurrentDevice {
public:
  explicit CurrentDevice(const Device &device);
  // For destructors: false if the driver has already ended, or this is a forked child. Then
  // there is nothing to release.
  CurrentDevice(const Device &device, std::nothrow_t) noexcept;
  explicit operator bool() const { return pushed_; }
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice &) = delete;

private:
  const RelaxedCapture relaxed_;
  bool pushed_;
};

// The classes below release in their destructors what they have. A constructor of several
// steps delegates to one that makes an object without anything, so that the destructor runs
// too when a later step fails.

// Memory on a device, filled with zeros. The destructor does not wait for the device: the
// memory is kept for the next (block_cache.hpp).
class DeviceMemory {
public:
  DeviceMemory() = default;
  DeviceMemory(Device &device, std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory &&) noexcept;
  DeviceMemory &operator=(DeviceMemory &&) noexcept;

  Address address() const { return address_; }
  std::size_t bytes() const { return bytes_; }
  template <class T> T *as(std::size_t offset = 0) const {
    return reinterpret_cast<T *>(address_ + offset);
  }
  // From the host; returns when it is done.
  void write(std::size_t offset, const void *from, std::size_t bytes) const;
  void read(std::size_t offset, void *to, std::size_t bytes) const; // likewise

private:
  Device *device_ = nullptr;
  Address address_ = 0;
  std::size_t bytes_ = 0;
};

// Memory of another process of this host. To be destroyed by the thread that releases.
class ImportedMemory {
public:
  // Null, and the driver's result, if it cannot be mapped.
  static std::unique_ptr<ImportedMemory> open(const Device &device, const IpcHandle &handle,
                                              Result &result);
  ~ImportedMemory();
  ImportedMemory(const ImportedMemory &) = delete;
  Address address() const { return address_; }

private:
  explicit ImportedMemory(const Device &device) : device_(device) {}
  const Device &device_;
  Address address_ = 0;
};

// Memory of the host that a device reads and writes.
class PinnedMemory {
public:
  PinnedMemory(const Device &device, std::size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory &) = delete;
  template <class T> T *host() const { return static_cast<T *>(host_); }
  template <class T> T *device() const { return reinterpret_cast<T *>(address_); }

private:
  explicit PinnedMemory(const Device &device) : device_(device) {}
  const Device &device_;
  void *host_ = nullptr;
  Address address_ = 0;
};

// An event of a device, without times.
class DeviceEvent {
public:
  explicit DeviceEvent(const Device &device);
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent &) = delete;
  operator Event() const { return event_; }

private:
  const Device &device_;
  Event event_ = nullptr;
};

// The allocation that an address of device memory belongs to.
struct AddressRange {
  Address base = 0;
  std::size_t bytes = 0;
};
AddressRange range_of(Address address);

// The device that an address of device memory belongs to. Makes no context: memory is in one
// that exists.
Device &device_of(Address address);

// The seconds in which a device copies so many bytes within its memory, by the driver: the
// mean of some copies. Each byte is read once and written once.
double copy_seconds(Device &device, std::size_t bytes, int repeats);

} // namespace unisono::cuda
