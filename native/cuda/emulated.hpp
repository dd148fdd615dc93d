// The emulation of CUDA's driver: its functions, and what all of its files share.
//
// There is one state for each process that calls cuInit. One lock guards all of it, and no
// work of a stream runs under that lock. A forked child is refused: it has copies of the
// objects, but none of the threads.
//
// Handles of objects are numbers that are never used again, so a handle that was destroyed is
// always recognized.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "cuda/api.hpp"
#include "kernels/dtypes.hpp"
#include "support/fork.hpp"

namespace unisono::cuda::emulated {

#define UNISONO_CUDA_DECLARE(name, arguments) Result name arguments;
UNISONO_CUDA_ALL_FUNCTIONS(UNISONO_CUDA_DECLARE)
#undef UNISONO_CUDA_DECLARE

// The driver's numbers of the errors that the emulation returns; their names: errors.
enum Code : Result {
  invalid_value = 1,
  out_of_memory = 2,
  not_initialized = 3,
  no_device = 100,
  invalid_device = 101,
  invalid_image = 200,
  invalid_context = 201,
  map_failed = 205,
  no_binary_for_gpu = 209,
  peer_access_unsupported = 217,
  invalid_handle = 400,
  illegal_state = 401,
  not_found = 500,
  illegal_address = 700,
  launch_out_of_resources = 701,
  peer_access_already_enabled = 704,
  host_memory_already_registered = 712,
  host_memory_not_registered = 713,
  launch_failed = 719,
  not_supported = 801,
  capture_unsupported = 900,
  capture_invalidated = 901,
  capture_merge = 902,
  capture_unmatched = 903,
  capture_unjoined = 904,
  capture_isolation = 905,
  capture_implicit = 906,
  captured_event = 907,
  capture_wrong_thread = 908,
  unknown = 999,
};

// From the environment, read once: UNISONO_EMULATED_...
struct Settings {
  Settings();
  int devices;          // GPUS: how many, 1
  int multiprocessors;  // MULTIPROCESSORS: of each, 132
  int threads;          // THREADS: at most so many run for a block, 2
  std::uint64_t memory; // MEMORY: bytes of each device that this process can allocate, 8 GiB
  bool peers;           // PEERS: whether devices access each other's memory, 1
  bool refusals;        // REFUSALS: whether memory behind freed memory is not opened, 0
  bool waits;           // WAITS: whether what may wait for kernels does so always, 0
  int queues;           // QUEUES: 1: streams share as many as CUDA_DEVICE_MAX_CONNECTIONS says
                        // (8); 0: each has its own, 0
};

// Objects by their handles.
template <class Handle, class Object> class Table {
public:
  Handle add(std::shared_ptr<Object> object) {
    last_ += 16;
    objects_[last_] = std::move(object);
    return Handle(last_);
  }
  std::shared_ptr<Object> find(Handle handle) const {
    const auto found = objects_.find(std::uint64_t(handle));
    return found == objects_.end() ? nullptr : found->second;
  }
  std::shared_ptr<Object> take(Handle handle) {
    const auto node = objects_.extract(std::uint64_t(handle));
    return node.empty() ? nullptr : node.mapped();
  }
  template <class Predicate> void erase_if(Predicate predicate) {
    std::erase_if(objects_, [&](const auto &entry) { return predicate(*entry.second); });
  }
  auto begin() const { return objects_.begin(); }
  auto end() const { return objects_.end(); }

private:
  std::map<std::uint64_t, std::shared_ptr<Object>> objects_;
  std::uint64_t last_ = 0x1000; // 1 and 2 are streams that CUDA defines
};

struct MemoryState;   // emulated_memory.hpp
class StreamsState;   // emulated_streams.hpp

struct ModuleState {
  int device;
  DType dtype;
  Op op;
};
struct FunctionState {
  std::shared_ptr<const ModuleState> module;
  bool loaded = false; // only when it is used
};

struct DeviceState {
  int retained = 0;             // of its primary context
  std::uint64_t used = 0;       // bytes allocated
  Result failed = success;      // of work on the device: all later calls return it
  std::set<int> peers;          // to which access was enabled
};

struct State {
  State();
  Origin origin;
  const Settings settings;
  std::mutex mutex; // of everything below
  std::vector<DeviceState> devices;
  std::unique_ptr<MemoryState> memory;
  std::unique_ptr<StreamsState> streams;
  Table<Module, ModuleState> modules;
  Table<Function, FunctionState> functions;
};

// For tests: how often a function was called; all functions; and that the call of it with this
// number, counted from now, fails (0: none). False: there is no such function.
std::uint64_t calls_of(std::string_view name);
std::uint64_t all_calls();
bool fail_call(std::string_view name, std::int64_t number, Result failure);
// What exists now in this process, by kind.
std::map<std::string, std::size_t> objects();

// The state of this process; null before cuInit. Never destroyed.
State *state();
// The devices of the contexts that this thread has pushed.
std::vector<int> &pushed_contexts();

// What a function of the driver works on, while it holds the lock.
struct Entry {
  State &state;
  std::unique_lock<std::mutex> lock;
  int device = -1; // of the current context
};

// Calls `body` with an Entry, unless cuInit was not called or this is a forked child.
template <class Body> Result with_driver(Body body) {
  State *const found = state();
  if (found == nullptr || found->origin.forked())
    return not_initialized;
  try {
    Entry entry{*found, std::unique_lock(found->mutex)};
    return body(entry);
  } catch (const std::bad_alloc &) {
    return out_of_memory;
  } catch (const std::system_error &) { // no more threads
    return out_of_memory;
  }
}

// The same where a current context is needed, whose device has not failed.
template <class Body> Result with_context(Body body) {
  return with_driver([&](Entry &at) -> Result {
    if (pushed_contexts().empty())
      return invalid_context;
    at.device = pushed_contexts().back();
    const DeviceState &current = at.state.devices[std::size_t(at.device)];
    if (current.retained == 0)
      return invalid_context;
    return current.failed != success ? current.failed : body(at);
  });
}

inline bool is_device(const State &state, int device) {
  return device >= 0 && device < state.settings.devices;
}

} // namespace unisono::cuda::emulated
