// One rank's half of a communicator on a CUDA device.
//
// Each rank has an arena in device memory: the words of its blocks, and its windows. Ranks of
// one process use each other's addresses, ranks of other processes map the arena by its
// handle. A launch runs the interpreter; nothing on the host takes part in a call.
//
// A communicator of the CPU's engine stands behind it: it knows which ranks have died or
// closed, and its failure word breaks both halves. A thread of this class watches that word
// and what kernels report: device_comm_watcher.cpp.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda/board.hpp"
#include "cuda/device.hpp"
#include "device/tables.hpp"
#include "engine/comm.hpp"

namespace unisono::cuda {

// Marks the numbers of calls on a device in failures: they are counted apart.
constexpr std::uint32_t device_call = 1u << 31;

// A compiled kernel on a device.
class Kernel {
public:
  Kernel(const Device &device, const void *image);
  ~Kernel();
  Kernel(const Kernel &) = delete;
  Function function() const { return function_; }
  int blocks_per_multiprocessor(int threads) const;

private:
  explicit Kernel(const Device &device) : device_(device) {}
  const Device &device_;
  Module module_ = nullptr;
  Function function_ = nullptr;
};

// A plan with its tables on a device.
class DevicePlan {
public:
  DevicePlan(Device &device, std::shared_ptr<const Plan> plan);
  const device::PackedPlan &packed() const { return packed_; }
  const std::byte *tables() const { return memory_.as<const std::byte>(); }

private:
  device::PackedPlan packed_;
  DeviceMemory memory_;
};

// What a rank tells the others when the device communicator is made.
struct Announcement {
  std::int64_t pid = 0;
  std::uint64_t process = 0; // tells processes with equal pids of several namespaces apart
  std::int32_t ordinal = 0;  // valid in its own process
  Address arena = 0;         // likewise
  IpcHandle handle{};
};

class DeviceComm {
public:
  // `board` is memory that the processes of all ranks share: board_bytes() of zeros.
  // The communicator behind it must exist until close() has returned.
  DeviceComm(Comm &comm, Device &device, std::size_t half, std::shared_ptr<Memory> board);
  static std::size_t board_bytes(std::size_t n) { return n * sizeof(BoardRank); }
  ~DeviceComm();
  DeviceComm(const DeviceComm &) = delete;

  // To be given to all ranks, which from then on may map this rank's memory.
  Announcement announcement();
  // Maps the arenas of all ranks; those of this process by their addresses.
  void connect(const std::vector<Announcement> &ranks);

  struct Arguments {
    const DevicePlan *plan;
    const Kernel *kernel;
    Address input, output;
    Stream stream;
    std::int64_t timeout_ns; // 0: none
    int blocks, threads;
  };
  // Starts a call on a stream, after the earlier calls of this communicator. Whether it was
  // captured instead, for a graph.
  bool launch(const Arguments &arguments);

  // How many of the ranks are in this process.
  std::size_t ranks_here() const;
  // Whether all calls that were made have ended.
  bool is_idle();
  // Calls that were made, without those that a graph repeats.
  std::uint64_t launched() const { return launched_.load(std::memory_order_acquire); }
  // Calls that have ended, as far as the host has seen.
  std::uint64_t done() const;
  // Looks for failures now, as the watcher does from time to time; asks nothing of the driver.
  void look();
  // No more calls. Waits until those that were made have ended or failed. To be called before
  // the communicator behind it is closed.
  void close();
  // Unmaps what is of other ranks, and deletes it when they have done so as well. The calls
  // of one that is not closed are aborted. Does not wait for the device.
  static void release(DeviceComm *comm);

private:
  struct HostWords { // in pinned memory
    alignas(64) std::uint32_t abort;
    alignas(64) device::FailureSlot failure;
    alignas(64) std::uint64_t done;
  };

  // Buffers that are used in place: device_comm_segments.cpp.
  struct Place { // as other ranks find it
    std::uint64_t segment, offset;
  };
  struct Known { // an allocation of this rank
    std::uint64_t id = 0, segment = 0;
  };
  std::optional<Place> place_of(Address address);
  std::uint64_t share(Address base);
  bool is_mapped_by_all(std::uint64_t segment) const;
  void map_new_segments();
  void expose(device::Launch &launch, int which, Address address);

  bool is_used_by_others() const;
  void wait_for_calls();
  void stop_watching();
  void watch();
  void report_failure();
  void report_deaths();
  bool order_after_last(Stream stream);

  Comm &comm_;
  const std::size_t rank_;
  const std::vector<std::size_t> world_ranks_;
  const std::shared_ptr<HostPeers> host_peers_;
  Device &device_;
  const std::size_t half_;
  DeviceMemory arena_, peers_, segments_;
  PinnedMemory host_;
  std::shared_ptr<Memory> board_memory_;
  BoardRank *board_;
  std::vector<bool> is_here_; // by rank: whether it is in this process
  std::vector<bool> is_unmappable_; // by rank: whether mapping a segment of it has failed
  std::mutex mapping_;
  std::vector<std::unique_ptr<ImportedMemory>> imported_;
  std::map<Address, Known> known_; // by base
  bool one_process_ = false; // addresses are valid on all ranks
  std::mutex launching_;
  std::atomic<std::uint64_t> launched_ = 0;
  Event last_ = nullptr; // behind the last call
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false, announced_ = false, connected_ = false, closed_ = false;
  std::atomic<bool> reported_ = false;
  Worker watcher_;
};

} // namespace unisono::cuda
