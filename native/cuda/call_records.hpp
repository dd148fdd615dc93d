// What is recorded of the calls on a device: in the flight recorder, and in the trace.
//
// The host learns that a call has ended from a word that its kernel writes; while a trace is
// recorded the kernel also writes when it began, when all ranks had arrived, and when it
// ended. Nothing is asked of the driver, so captures of graphs are not disturbed.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>

#include "cuda/device.hpp"
#include "device/launch.hpp"
#include "engine/comm.hpp"

namespace unisono::cuda {

// The clock of a device, as that of the host. A kernel begins after the host has launched
// it, soon after if the stream was idle: the two clocks differ by the largest difference that
// was seen lately. So times are too early by the shortest launch, some microseconds.
class DeviceClock {
public:
  // A kernel that was launched at a time of the host began at a time of the device.
  void add(std::int64_t launched, std::uint64_t begun);
  std::int64_t to_host(std::uint64_t time) const {
    return std::int64_t(time) + std::max(now_, before_);
  }

private:
  static constexpr std::int64_t window = 250'000'000; // the clocks do not run equally fast
  static constexpr std::int64_t unknown = std::numeric_limits<std::int64_t>::min();
  std::int64_t since_ = unknown, now_ = unknown, before_ = unknown;
};

class CallRecords {
public:
  // A call as its caller made it.
  struct Call {
    const Note *note;
    Stream stream;
    std::uint32_t site; // where Python called: bindings/call_sites.hpp
    bool queued;        // not on the stream of its caller
  };

  CallRecords(Comm &comm, const Device &device);
  ~CallRecords();
  CallRecords(const CallRecords &) = delete;

  // A call that is launched next, or captured for a graph; tells the kernel where to report.
  void launch(const Call &call, device::Launch &launch);
  void capture(const Call &call, device::Launch &launch);
  // The last one could not be launched.
  void cancel();
  // While a trace is recorded: lets the device tell its time, now and then.
  void read_clock(Function kernel);

  // Reads what kernels have written.
  void look();
  // The same; all calls that have not ended have failed.
  void fail();
  // A kernel has told the number of its call, which is known by `done` of its launch.
  void set_number(const std::uint64_t *done, std::uint64_t number);
  // The number of the last call that has ended; those that graphs repeat count.
  std::uint64_t last();
  // The note of a call that has not ended.
  std::optional<Note> note_of(std::uint64_t number);

private:
  static constexpr std::size_t capacity = 1024; // calls in flight that are followed
  static constexpr std::size_t num_times = 3;

  struct Slot { // written by the kernel of one call
    std::uint64_t done; // its number, when it has ended
    std::uint64_t times[num_times];
  };
  struct HostMemory { // pinned
    Slot slots[capacity];
    // The number of the last call that had no slot, as those that a graph repeats.
    alignas(64) std::uint64_t repeated;
    // What a call of one rank that does nothing needs, by which the device tells its time.
    alignas(64) Slot clock;
    device::Peer peer;
    alignas(128) std::byte words[offsetof(device::RankWords, blocks) +
                                 sizeof(device::BlockWords)];
  };
  struct Pending {
    Record *record;
    std::uint64_t id; // of the record, which may be overwritten
    std::uint64_t number; // as far as it is known
    Slot *slot; // null: too many are in flight
    bool traced, queued;
  };

  Record &record(const Call &call, std::int64_t now);
  Slot *take_slot();
  void read();
  void read_own_clock();
  void compare_clocks(const Pending &call);
  void renumber(std::size_t first, std::uint64_t number);
  void begin(const Pending &call);
  void end(const Pending &call, Record::State how, std::int64_t now);
  void trace(const Record &record, std::int64_t arrived, bool queued);

  const std::shared_ptr<Recorder> recorder_;
  const std::shared_ptr<Trace> trace_;
  const std::uint64_t communicator_;
  const Device &device_;
  PinnedMemory memory_;
  HostMemory &host_;
  HostMemory *const on_device_; // the same, as kernels find it
  std::mutex mutex_;
  std::deque<Pending> pending_;
  std::uint64_t last_ = 0;
  std::size_t next_slot_ = 0, used_slots_ = 0;
  DeviceClock clock_;
  std::int64_t last_ended_ = 0; // of the calls whose times are known
  std::int64_t asked_ = 0, last_asked_ = 0; // when the device was asked for its time
  Stream clock_stream_ = nullptr;
};

} // namespace unisono::cuda
