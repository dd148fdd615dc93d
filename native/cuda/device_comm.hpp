// One rank's half of a communicator on a CUDA device.
//
// Each rank has an arena in device memory: the words of its blocks, and its windows. Ranks of
// one process use each other's addresses, ranks of other processes map the arena by its
// handle. Where a device cannot access the memory of another one, the arenas of all ranks are
// in host memory that their processes share, and all calls go through the windows. A launch
// runs the interpreter; nothing on the host takes part in a call.
//
// A communicator of the CPU's engine stands behind it: it knows which ranks have died or
// closed, and its failure word breaks both halves. A thread of this class watches that word
// and what kernels report: device_comm_watcher.cpp.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda/board.hpp"
#include "cuda/call_records.hpp"
#include "cuda/device.hpp"
#include "cuda/mapped_segments.hpp"
#include "cuda/plan_tables.hpp"
#include "cuda/registered_memory.hpp"
#include "cuda/shared_segments.hpp"
#include "device/tables.hpp"
#include "engine/comm.hpp"

namespace unisono::cuda {

// A compiled kernel on a device. It is loaded completely when it is made, and not when it is
// first launched, as CUDA does by default (CUDA_MODULE_LOADING=LAZY): to load a kernel the driver
// may wait for those that run, which may wait for the one that is launched.
class Kernel {
public:
  Kernel(const Device &device, const void *image);
  ~Kernel();
  Kernel(const Kernel &) = delete;
  // For calls whose data travel as packets, or for others.
  Function function(bool packets) const { return packets ? exchange_ : interpret_; }

private:
  explicit Kernel(const Device &device) : device_(device) {}
  void load(const void *image);
  Function find(const char *name) const;
  const Device &device_;
  Module module_ = nullptr;
  Function interpret_ = nullptr, exchange_ = nullptr;
};

// A plan of one communicator, with its tables on the device.
class DevicePlan {
public:
  DevicePlan(TableMemory &memory, std::shared_ptr<const Plan> plan)
      : packed_(std::move(plan)), tables_(memory.add(packed_.bytes())) {}
  const device::PackedPlan &packed() const { return packed_; }
  Tables &tables() { return tables_; } // used by who launches

private:
  device::PackedPlan packed_;
  Tables tables_;
};

// What a rank tells the others when the device communicator is made.
struct Announcement {
  std::int64_t pid = 0;
  std::uint64_t process = 0; // tells processes with equal pids of several namespaces apart
  std::int32_t ordinal = 0;  // valid in its own process
  std::int32_t has_handle = 0;
  Uuid uuid{};               // of its device
  Address arena = 0;         // in its own process; 0: it has none in device memory
  IpcHandle handle{};
};

class DeviceComm final : CallsMade {
public:
  // `board` is memory that the processes of all ranks share: board_bytes() of zeros.
  // The communicator behind it must exist until close() has returned.
  // `timeout_ns` is the time limit of its calls, which may change; 0: none.
  DeviceComm(Comm &comm, Device &device, std::size_t half, std::shared_ptr<Memory> board,
             const std::atomic<std::int64_t> *timeout_ns);
  static std::size_t board_bytes(std::size_t n) { return n * sizeof(BoardRank); }
  DeviceComm(const DeviceComm &) = delete;

  // What is done once, by all ranks together, before the first call: allocate() if the
  // windows shall be in device memory; connect(); disconnect() and place_on_host() if they
  // are not, or cannot be; start(). All ranks have made a step before one makes the next.
  void allocate();
  // To be given to all ranks, which from then on may map this rank's memory.
  Announcement announcement();
  // Knows the other ranks, and maps their arenas; those of this process by their addresses.
  // Why that cannot be done; empty if it can.
  std::string connect(const std::vector<Announcement> &ranks);
  // Undoes what connect() has mapped.
  void disconnect();
  // In a segment of shared memory with host_bytes() of zeros.
  void place_on_host(std::size_t owner, std::uint64_t segment);
  static std::size_t host_bytes(std::size_t n, std::size_t half);
  void start();

  struct Arguments {
    DevicePlan *plan;
    const Kernel *kernel;
    Address input, output;
    Stream stream, current; // the call's, after what is now on its caller's
    std::int64_t timeout_ns; // 0: none; negative: that of the communicator
    int blocks, threads;
    bool packets; // data travel with flags; the same on all ranks
    std::uint32_t site; // where Python called: bindings/call_sites.hpp
    bool queued;        // not on the stream of its caller
    std::size_t kept; // bytes that are kept for it until ended() tells that it has ended
  };
  // Starts a call on a stream, after the earlier calls of this communicator. Its number, from 1;
  // 0 if it was captured instead, for a graph; nothing if it was refused, since the communicator
  // has failed or is closed, or this is a forked child.
  std::optional<std::uint64_t> launch(const Arguments &arguments);
  // How many calls have ended at least: it is asked for from time to time if something is kept.
  std::uint64_t ended() const { return ended_.load(std::memory_order_relaxed); }

  // Calls that were made with a buffer that all ranks can use in place.
  std::uint64_t exposed() const { return exposed_.load(std::memory_order_relaxed); }
  // Where the tables of its plans are.
  TableMemory &tables() { return *tables_; }
  // How many of the ranks are in this process.
  std::size_t ranks_here() const;
  // Whether all calls that were made have ended.
  bool is_idle();
  // Whether all ranks can use a buffer in place, as far as it was used.
  SharedSegments::State sharing_of(Address address, std::size_t bytes);
  // Looks for failures now, as the watcher does from time to time; asks nothing of the driver.
  void look();
  // No more calls. Waits until those that were made have ended or failed, and until no kernel
  // of another process reads memory of this rank: device_comm_closing.cpp. To be called before
  // the communicator behind it is closed.
  void close();
  // Unmaps what is of other ranks, and deletes it when they have done so as well. The calls
  // of one that is not closed are aborted. Does not wait for the device.
  static void release(DeviceComm *comm);

private:
  struct HostWords { // in pinned memory
    alignas(64) std::uint32_t abort;
    alignas(64) device::FailureSlot failure;
    alignas(64) std::uint64_t begun; // by graphs
  };

  void expose_buffers(device::Launch &launch, const Arguments &arguments);
  // Of the input (0) or the output (1).
  void expose(device::Launch &launch, int which, Address address, std::size_t bytes);

  std::string reach(std::size_t rank, const Announcement &announced);
  bool is_used_by_others() const;
  bool is_in_flight();
  void wait_for_calls();
  void set_closed();
  std::byte *arena_on_host() const; // of this rank
  void wait_for_readers();
  bool has_readers() const;
  void acknowledge_closed();
  std::optional<std::size_t> find_closed(bool unacknowledged) const;
  bool is_quiet();
  bool is_in_a_call() const;
  void read_words(device::RankWords &words) const;
  void stop_watching();
  void watch();
  void report_failure();
  void describe_own_call(const Failure &failure);
  std::uint32_t next_call();
  void report_deaths();
  bool order_after_last(Stream stream);
  device::Launch argument(const Arguments &arguments, bool captured);
  bool is_refused();
  void await_end(std::size_t kept);
  void mark_calls(Stream stream);
  void look_for_ended();
  std::uint64_t launched() const override {
    return launched_.load(std::memory_order_acquire);
  }
  bool have_ended(std::uint64_t calls) override;
  bool shares_segments() const { return !one_process_ && !on_host_; }
  void update_segments(std::size_t most, CallsMade *calls);
  void look_for_freed_memory();

  Comm &comm_;
  const std::atomic<std::int64_t> *const timeout_ns_;
  const std::size_t rank_;
  const std::vector<std::size_t> world_ranks_;
  const std::shared_ptr<HostPeers> host_peers_;
  Device &device_;
  const std::size_t half_;
  DeviceMemory arena_, peers_;
  std::shared_ptr<RegisteredMemory> on_host_; // the arenas of all ranks, if they are there
  std::vector<Address> arenas_; // of all ranks, as this rank's device finds them
  PinnedMemory host_;
  const std::shared_ptr<TableMemory> tables_;
  std::shared_ptr<Memory> board_memory_;
  BoardRank *board_;
  std::vector<bool> is_here_; // by rank: whether it is in this process
  std::vector<std::unique_ptr<ImportedMemory>> imported_; // arenas
  bool one_process_ = false; // addresses are valid on all ranks
  SharedSegments shared_; // used by who launches
  MappedSegments mapped_;
  std::mutex launching_, closing_;
  std::atomic<std::uint64_t> launched_ = 0, exposed_ = 0;
  DeviceEvent last_; // behind the last call
  // Behind some earlier call: how many are before it, how many have ended, how many shall.
  DeviceEvent mark_;
  std::uint64_t marked_ = 0, awaited_ = 0;
  std::atomic<std::uint64_t> ended_ = 0;
  std::uint64_t looked_ = 0;   // how many had been made when it was last asked which have ended
  std::size_t kept_bytes_ = 0; // of the calls since then
  DeviceEvent before_;         // behind what the caller of a call has on its own stream
  bool is_captured_ = false; // a graph may make calls at any time
  std::uint64_t last_seen_ = 0; // calls that had ended when it was last asked
  DeviceEvent last_captured_; // behind the last call that was captured
  std::uint64_t capture_ = 0;     // by which
  CallRecords calls_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false, announced_ = false, connected_ = false, closed_ = false;
  std::atomic<bool> reported_ = false;
  std::mutex describing_;
  Note failed_{}; // this rank's call that has failed; its number is 0 if it is not known
  Worker watcher_;
};

} // namespace unisono::cuda
