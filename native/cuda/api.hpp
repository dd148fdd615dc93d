// CUDA's driver API, opened at run time: the module is not linked to it, and nothing of CUDA
// is needed to build it. Types and numbers are those of cuda.h, as far as they are used.

#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace unisono::cuda {

using Result = int; // 0: success
using DeviceNumber = int;
using Address = std::uint64_t; // of device memory
using Context = struct ContextObject *;
using Stream = struct StreamObject *; // null: the default stream
using Event = struct EventObject *;
using Module = struct ModuleObject *;
using Function = struct FunctionObject *;
using Graph = struct GraphObject *;
using GraphExec = struct GraphExecObject *;
using GraphNode = struct GraphNodeObject *;
using Allocation = std::uint64_t; // physical memory

struct Uuid {
  unsigned char bytes[16];
};
struct IpcHandle {
  unsigned char bytes[64];
};
struct Location {
  int type, id; // type 1: a device
};
struct AllocationProperties {
  int type;        // 1: pinned
  int handle_type; // 1: a file descriptor
  Location location;
  void *windows_attributes;
  struct {
    unsigned char compression, gpu_direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
struct AccessDescription {
  Location location;
  int flags; // 3: read and write
};

constexpr Result success = 0, already_mapped = 208, not_ready = 600;
constexpr unsigned host_mapped = 2, host_portable = 1;          // cuMemHostAlloc, -Register
constexpr unsigned event_without_timing = 2;                    // cuEventCreate
constexpr unsigned stream_non_blocking = 1;                     // cuStreamCreate
constexpr unsigned wait_for_at_least = 0;                       // cuStreamWaitValue32
constexpr unsigned ipc_lazy_peer_access = 1;                    // cuIpcOpenMemHandle
constexpr int capture_global = 0, capture_of_thread = 1, capture_relaxed = 2; // BeginCapture
constexpr int attribute_multiprocessors = 16, attribute_major = 75, attribute_minor = 76,
              attribute_mps = 133;
constexpr int pointer_context = 1, pointer_memory_type = 2, pointer_device = 9,
              pointer_ipc_capable = 10;                         // cuPointerGetAttribute
constexpr int memory_host = 1, memory_device = 2;
constexpr int on_device = 1, as_descriptor = 1; // kinds of a location, and of a handle
constexpr int function_registers = 4;                           // cuFuncGetAttribute

// Every function that is needed: its result, always Result; its name; its arguments.
#define UNISONO_CUDA_FUNCTIONS(X)                                                               \
  X(cuInit, (unsigned flags))                                                                  \
  X(cuDriverGetVersion, (int *version))                                                        \
  X(cuGetErrorName, (Result, const char **name))                                               \
  X(cuGetErrorString, (Result, const char **text))                                             \
  X(cuDeviceGetCount, (int *count))                                                            \
  X(cuDeviceGet, (DeviceNumber *, int ordinal))                                                \
  X(cuDeviceGetName, (char *name, int length, DeviceNumber))                                   \
  X(cuDeviceGetUuid_v2, (Uuid *, DeviceNumber))                                                \
  X(cuDeviceGetPCIBusId, (char *text, int length, DeviceNumber))                               \
  X(cuDeviceGetAttribute, (int *value, int attribute, DeviceNumber))                           \
  X(cuDeviceTotalMem_v2, (std::size_t * bytes, DeviceNumber))                                  \
  X(cuDeviceCanAccessPeer, (int *can, DeviceNumber, DeviceNumber peer))                        \
  X(cuDevicePrimaryCtxRetain, (Context *, DeviceNumber))                                       \
  X(cuDevicePrimaryCtxRelease_v2, (DeviceNumber))                                              \
  X(cuDevicePrimaryCtxGetState, (DeviceNumber, unsigned *flags, int *active))                  \
  X(cuCtxPushCurrent_v2, (Context))                                                            \
  X(cuCtxPopCurrent_v2, (Context *))                                                           \
  X(cuCtxEnablePeerAccess, (Context peer, unsigned flags))                                     \
  X(cuMemAlloc_v2, (Address *, std::size_t bytes))                                             \
  X(cuMemFree_v2, (Address))                                                                   \
  X(cuMemHostAlloc, (void **, std::size_t bytes, unsigned flags))                              \
  X(cuMemFreeHost, (void *))                                                                   \
  X(cuMemHostRegister_v2, (void *, std::size_t bytes, unsigned flags))                         \
  X(cuMemHostUnregister, (void *))                                                             \
  X(cuMemHostGetDevicePointer_v2, (Address *, void *, unsigned flags))                         \
  X(cuMemcpyHtoD_v2, (Address to, const void *from, std::size_t bytes))                        \
  X(cuMemcpyDtoH_v2, (void *to, Address from, std::size_t bytes))                              \
  X(cuMemcpyAsync, (Address to, Address from, std::size_t bytes, Stream))                      \
  X(cuMemsetD8_v2, (Address, unsigned char value, std::size_t bytes))                          \
  X(cuMemsetD8Async, (Address, unsigned char value, std::size_t bytes, Stream))                \
  X(cuPointerGetAttribute, (void *value, int attribute, Address))                              \
  X(cuMemGetAddressRange_v2, (Address *base, std::size_t *bytes, Address))                     \
  X(cuIpcGetMemHandle, (IpcHandle *, Address))                                                 \
  X(cuIpcOpenMemHandle_v2, (Address *, IpcHandle, unsigned flags))                             \
  X(cuIpcCloseMemHandle, (Address))                                                            \
  X(cuMemGetAllocationGranularity,                                                             \
    (std::size_t * granularity, const AllocationProperties *, int option))                     \
  X(cuMemCreate, (Allocation *, std::size_t bytes, const AllocationProperties *,               \
                  unsigned long long flags))                                                   \
  X(cuMemRelease, (Allocation))                                                                \
  X(cuMemRetainAllocationHandle, (Allocation *, void *address))                                \
  X(cuMemExportToShareableHandle,                                                              \
    (void *handle, Allocation, int handle_type, unsigned long long flags))                     \
  X(cuMemImportFromShareableHandle, (Allocation *, void *handle, int handle_type))             \
  X(cuMemAddressReserve, (Address *, std::size_t bytes, std::size_t alignment, Address hint,   \
                          unsigned long long flags))                                           \
  X(cuMemAddressFree, (Address, std::size_t bytes))                                            \
  X(cuMemMap, (Address, std::size_t bytes, std::size_t offset, Allocation,                     \
               unsigned long long flags))                                                      \
  X(cuMemUnmap, (Address, std::size_t bytes))                                                  \
  X(cuMemSetAccess, (Address, std::size_t bytes, const AccessDescription *, std::size_t count))\
  X(cuStreamCreate, (Stream *, unsigned flags))                                                \
  X(cuStreamCreateWithPriority, (Stream *, unsigned flags, int priority))                      \
  X(cuCtxGetStreamPriorityRange, (int *least, int *greatest))                                  \
  X(cuStreamDestroy_v2, (Stream))                                                              \
  X(cuStreamSynchronize, (Stream))                                                             \
  X(cuStreamQuery, (Stream))                                                                   \
  X(cuStreamWaitEvent, (Stream, Event, unsigned flags))                                        \
  X(cuStreamIsCapturing, (Stream, int *status))                                                \
  X(cuStreamGetCaptureInfo_v2, (Stream, int *status, std::uint64_t *id, Graph *,               \
                                const GraphNode **dependencies, std::size_t *count))           \
  X(cuStreamBeginCapture_v2, (Stream, int mode))                                               \
  X(cuStreamEndCapture, (Stream, Graph *))                                                     \
  X(cuThreadExchangeStreamCaptureMode, (int *mode))                                            \
  X(cuGraphInstantiateWithFlags, (GraphExec *, Graph, unsigned long long flags))               \
  X(cuGraphLaunch, (GraphExec, Stream))                                                        \
  X(cuGraphExecDestroy, (GraphExec))                                                           \
  X(cuGraphDestroy, (Graph))                                                                   \
  X(cuEventCreate, (Event *, unsigned flags))                                                  \
  X(cuEventDestroy_v2, (Event))                                                                \
  X(cuEventRecord, (Event, Stream))                                                            \
  X(cuEventQuery, (Event))                                                                     \
  X(cuEventSynchronize, (Event))                                                               \
  X(cuEventElapsedTime, (float *milliseconds, Event begin, Event end))                         \
  X(cuModuleLoadData, (Module *, const void *image))                                           \
  X(cuModuleUnload, (Module))                                                                  \
  X(cuModuleGetFunction, (Function *, Module, const char *name))                               \
  X(cuFuncGetAttribute, (int *value, int attribute, Function))                                 \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor,                                               \
    (int *blocks, Function, int threads, std::size_t shared_bytes))                            \
  X(cuLaunchKernel, (Function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,        \
                     unsigned threads_x, unsigned threads_y, unsigned threads_z,               \
                     unsigned shared_bytes, Stream, void **arguments, void **extra))

// Functions that older drivers lack: null there.
#define UNISONO_CUDA_OPTIONAL_FUNCTIONS(X)                                                      \
  X(cuFuncLoad, (Function))                                                                    \
  X(cuStreamWaitValue32_v2, (Stream, Address, std::uint32_t value, unsigned flags))            \
  X(cuStreamWriteValue32_v2, (Stream, Address, std::uint32_t value, unsigned flags))
#define UNISONO_CUDA_ALL_FUNCTIONS(X)                                                          \
  UNISONO_CUDA_FUNCTIONS(X)                                                                    \
  UNISONO_CUDA_OPTIONAL_FUNCTIONS(X)

// The functions, from the driver's library or from the emulation of it.
struct Api {
#define UNISONO_CUDA_MEMBER(name, arguments) Result(*name) arguments = nullptr;
  UNISONO_CUDA_ALL_FUNCTIONS(UNISONO_CUDA_MEMBER)
#undef UNISONO_CUDA_MEMBER
  bool emulated = false;
};

// Raised as unisono's DeviceError.
class Error : public std::runtime_error {
public:
  Error(const std::string &what, Result result)
      : std::runtime_error(what), result(result) {}
  Result result;
};

// The driver's functions; throws Error, with the reason in words, if there is no driver or
// it lacks one of them. UNISONO_CUDA_DRIVER=emulated chooses the emulation, any other value
// a path. What was found is kept for the life of the process.
const Api &api();

// CUDA cannot be used in a fork of a process that has used it: the child has no thread of the
// driver, and locks may be held there for ever. So whoever is about to call the driver, or to
// take a lock that others hold while they call it, looks here first.
void mark_used();      // before this process first calls the driver
bool is_used();        // whether this process, or one that it is a fork of, has called it
bool is_used_before(); // whether this process is such a fork
void refuse_fork();    // throws Error if it is

// Throws Error with the name of the function and the driver's words.
void check(Result result, const char *function);
std::string in_words(Result result, const char *function);

// The emulation: device memory is the host's, kernels run on threads of the CPU. For tests,
// and for machines without a GPU: emulated_*.cpp.
Api emulated_api();

} // namespace unisono::cuda

// Calls a function of the driver and checks its result.
#define UNISONO_CUDA(name, ...)                                                                \
  (::unisono::cuda::refuse_fork(),                                                             \
   ::unisono::cuda::check(::unisono::cuda::api().name(__VA_ARGS__), #name))
