// Devices, their primary contexts, access to peers, and the names of errors.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "cuda/emulated.hpp"
#include "cuda/emulated_memory.hpp"
#include "cuda/emulated_streams.hpp"

namespace unisono::cuda::emulated {

namespace {

std::uint64_t setting(const char *name, std::uint64_t otherwise) {
  const char *const text = std::getenv(name);
  if (text == nullptr || *text == '\0')
    return otherwise;
  char *end = nullptr;
  const unsigned long long value = std::strtoull(text, &end, 10);
  if (*end == '\0' && *text >= '0' && *text <= '9')
    return value;
  throw Error(std::string(name) + "=" + text + " is not a number", invalid_value);
}

int small_setting(const char *name, std::uint64_t otherwise, std::uint64_t most) {
  return int(std::min(setting(name, otherwise), most));
}

std::atomic<State *> made = nullptr;

struct ErrorText {
  Result code;
  const char *name, *text;
};
constexpr ErrorText errors[] = {
    {success, "CUDA_SUCCESS", "no error"},
    {invalid_value, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {out_of_memory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {not_initialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {no_device, "CUDA_ERROR_NO_DEVICE", "no device is detected"},
    {invalid_device, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {invalid_image, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {invalid_context, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {map_failed, "CUDA_ERROR_MAP_FAILED", "mapping of memory failed"},
    {already_mapped, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {no_binary_for_gpu, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image for this device"},
    {peer_access_unsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "no peer access between these devices"},
    {invalid_handle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {illegal_state, "CUDA_ERROR_ILLEGAL_STATE", "the object is in the wrong state for this"},
    {not_found, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {not_ready, "CUDA_ERROR_NOT_READY", "device not ready"},
    {illegal_address, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access"},
    {launch_out_of_resources, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {peer_access_already_enabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
     "peer access is already enabled"},
    {host_memory_already_registered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the memory is registered already"},
    {host_memory_not_registered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "the memory is not registered"},
    {launch_failed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {not_supported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {capture_unsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted during a capture"},
    {capture_invalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "the capture failed because of an earlier error"},
    {capture_merge, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "two captures would be merged"},
    {capture_unmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "the capture did not begin in this stream"},
    {capture_unjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
     "a stream of the capture was not joined"},
    {capture_isolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "captured work would depend on uncaptured work"},
    {capture_implicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "the legacy stream would depend on a stream that captures"},
    {captured_event, "CUDA_ERROR_CAPTURED_EVENT", "the event was last recorded in a capture"},
    {capture_wrong_thread, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "another thread began the capture"},
    {unknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText *error_text(Result code) {
  for (const ErrorText &error : errors)
    if (error.code == code)
      return &error;
  return nullptr;
}

// A body that is given the state of a device.
template <class Body> Result with_device(int device, Body body) {
  return with_driver([&](Entry &at) -> Result {
    return is_device(at.state, device) ? body(at, at.state.devices[std::size_t(device)])
                                       : Result(invalid_device);
  });
}

// Contexts are numbered from 1; there is one for each device.
Context context_of(int device) { return Context(std::uintptr_t(device) + 1); }
int device_of(Context context) { return int(std::uintptr_t(context)) - 1; }

int attribute_of(const State &state, int attribute) {
  switch (attribute) {
  case 1: return 1024;     // threads of a block
  case 8: return 48 << 10; // bytes of a block's shared memory
  case 10: return 32;      // threads of a warp
  case 12: return 65536;   // registers of a block
  case attribute_multiprocessors: return state.settings.multiprocessors;
  case 31: return 1;        // kernels run at the same time
  case 39: return 2048;     // threads of a multiprocessor
  case 41: return 1;        // unified addresses
  case attribute_major: return 9;
  case attribute_minor: return 0;
  case 81: return 228 << 10; // bytes of shared memory of a multiprocessor
  case 82: return 65536;     // registers of a multiprocessor
  case 102: return 1;        // virtual memory management
  case 103: return 1;        // ... and its export as a descriptor
  default: return -1;
  }
}

} // namespace

Settings::Settings()
    : devices(small_setting("UNISONO_EMULATED_GPUS", 1, 64)),
      multiprocessors(small_setting("UNISONO_EMULATED_MULTIPROCESSORS", 132, 1024)),
      threads(std::max(1, small_setting("UNISONO_EMULATED_THREADS", 2, 1024))),
      memory(setting("UNISONO_EMULATED_MEMORY", std::uint64_t(8) << 30)),
      peers(setting("UNISONO_EMULATED_PEERS", 1) != 0),
      refusals(setting("UNISONO_EMULATED_REFUSALS", 0) != 0),
      waits(setting("UNISONO_EMULATED_WAITS", 0) != 0),
      queues(setting("UNISONO_EMULATED_QUEUES", 0) == 0
                 ? 0
                 : std::max(1, small_setting("CUDA_DEVICE_MAX_CONNECTIONS", 8, 32))) {}

State::State()
    : devices(std::size_t(settings.devices)), memory(std::make_unique<MemoryState>()),
      streams(std::make_unique<StreamsState>(*this)) {}

State *state() { return made.load(std::memory_order_acquire); }

std::vector<int> &pushed_contexts() {
  thread_local std::vector<int> pushed;
  return pushed;
}

std::map<std::string, std::size_t> objects() {
  State *const found = state();
  if (found == nullptr)
    return {};
  const std::lock_guard lock(found->mutex);
  std::map<std::string, std::size_t> counted;
  const auto count = [](const auto &all) {
    return std::size_t(std::distance(all.begin(), all.end()));
  };
  counted["memory"] = found->memory->blocks.size();
  counted["streams"] = count(found->streams->streams);
  counted["events"] = count(found->streams->events);
  counted["modules"] = count(found->modules);
  counted["contexts"] = 0;
  for (const DeviceState &device : found->devices)
    counted["contexts"] += std::size_t(device.retained);
  return counted;
}

Result cuInit(unsigned flags) {
  if (flags != 0)
    return invalid_value;
  if (State *const found = state())
    return found->origin.forked() ? Result(not_initialized) : success;
  try {
    auto fresh = std::make_unique<State>();
    if (fresh->settings.devices == 0)
      return no_device;
    State *expected = nullptr;
    if (made.compare_exchange_strong(expected, fresh.get(), std::memory_order_acq_rel))
      fresh.release();
    return success;
  } catch (const Error &) { // emulated_api has raised it in words
    return invalid_value;
  }
}

Result cuDriverGetVersion(int *version) {
  if (version == nullptr)
    return invalid_value;
  *version = 12040;
  return success;
}

Result cuGetErrorName(Result code, const char **name) {
  const ErrorText *const error = error_text(code);
  *name = error == nullptr ? nullptr : error->name;
  return error == nullptr ? Result(invalid_value) : success;
}

Result cuGetErrorString(Result code, const char **text) {
  const ErrorText *const error = error_text(code);
  *text = error == nullptr ? nullptr : error->text;
  return error == nullptr ? Result(invalid_value) : success;
}

Result cuDeviceGetCount(int *count) {
  return with_driver([&](Entry &at) -> Result {
    *count = at.state.settings.devices;
    return success;
  });
}

Result cuDeviceGet(DeviceNumber *device, int ordinal) {
  return with_device(ordinal, [&](Entry &, DeviceState &) -> Result {
    *device = ordinal;
    return success;
  });
}

Result cuDeviceGetName(char *name, int length, DeviceNumber device) {
  return with_device(device, [&](Entry &, DeviceState &) -> Result {
    if (length <= 0)
      return invalid_value;
    std::snprintf(name, std::size_t(length), "Emulated GPU");
    return success;
  });
}

Result cuDeviceGetUuid_v2(Uuid *uuid, DeviceNumber device) {
  return with_device(device, [&](Entry &, DeviceState &) -> Result {
    std::memcpy(uuid->bytes, "unisono-emulate", 15);
    uuid->bytes[15] = static_cast<unsigned char>(device);
    return success;
  });
}

Result cuDeviceGetPCIBusId(char *text, int length, DeviceNumber device) {
  return with_device(device, [&](Entry &, DeviceState &) -> Result {
    if (length < 13)
      return invalid_value;
    std::snprintf(text, std::size_t(length), "0000:%02x:00.0", unsigned(device) + 1);
    return success;
  });
}

Result cuDeviceGetAttribute(int *value, int attribute, DeviceNumber device) {
  return with_device(device, [&](Entry &at, DeviceState &) -> Result {
    const int found = attribute_of(at.state, attribute);
    if (found < 0)
      return invalid_value;
    *value = found;
    return success;
  });
}

Result cuDeviceTotalMem_v2(std::size_t *bytes, DeviceNumber device) {
  return with_device(device, [&](Entry &at, DeviceState &) -> Result {
    *bytes = at.state.settings.memory;
    return success;
  });
}

Result cuDeviceCanAccessPeer(int *can, DeviceNumber device, DeviceNumber peer) {
  return with_device(device, [&](Entry &at, DeviceState &) -> Result {
    if (!is_device(at.state, peer))
      return invalid_device;
    *can = device != peer && at.state.settings.peers;
    return success;
  });
}

Result cuDevicePrimaryCtxRetain(Context *context, DeviceNumber device) {
  return with_device(device, [&](Entry &at, DeviceState &current) -> Result {
    if (at.state.settings.memory == 0)
      return out_of_memory;
    ++current.retained;
    *context = context_of(device);
    return success;
  });
}

Result cuDevicePrimaryCtxRelease_v2(DeviceNumber device) {
  return with_device(device, [&](Entry &at, DeviceState &current) -> Result {
    if (current.retained == 0)
      return invalid_context;
    if (--current.retained > 0)
      return success;
    at.state.streams->destroy_of(at.lock, device);
    free_memory_of(at.state, device);
    current.failed = success;
    current.peers.clear();
    return success;
  });
}

Result cuDevicePrimaryCtxGetState(DeviceNumber device, unsigned *flags, int *active) {
  return with_device(device, [&](Entry &, DeviceState &current) -> Result {
    if (flags == nullptr || active == nullptr)
      return invalid_value;
    *flags = 0;
    *active = current.retained > 0;
    return success;
  });
}

Result cuCtxPushCurrent_v2(Context context) {
  const int device = device_of(context);
  return with_driver([&](Entry &at) -> Result {
    if (!is_device(at.state, device) || at.state.devices[std::size_t(device)].retained == 0)
      return invalid_context;
    pushed_contexts().push_back(device);
    return success;
  });
}

Result cuCtxPopCurrent_v2(Context *context) {
  return with_driver([&](Entry &) -> Result {
    std::vector<int> &pushed = pushed_contexts();
    if (pushed.empty())
      return invalid_context;
    if (context != nullptr)
      *context = context_of(pushed.back());
    pushed.pop_back();
    return success;
  });
}

Result cuCtxEnablePeerAccess(Context peer, unsigned flags) {
  return with_context([&](Entry &at) -> Result {
    const int device = device_of(peer);
    if (flags != 0)
      return invalid_value;
    if (!is_device(at.state, device) || at.state.devices[std::size_t(device)].retained == 0)
      return invalid_context;
    if (device == at.device)
      return invalid_device;
    if (!at.state.settings.peers)
      return peer_access_unsupported;
    if (const Result unsafe = at.state.streams->refuse_unsafe())
      return unsafe;
    const bool enabled = at.state.devices[std::size_t(at.device)].peers.insert(device).second;
    return enabled ? success : Result(peer_access_already_enabled);
  });
}

} // namespace unisono::cuda::emulated
