// Modules and launches. The image of a module is the text "unisono-emulated D O": the numbers
// of the element type and of the operation (kernels/dtypes.hpp).

#include <algorithm>
#include <charconv>
#include <cstring>
#include <iterator>
#include <string_view>

#include "cuda/emulated_memory.hpp"
#include "cuda/emulated_streams.hpp"
#include "device/target_cpu.hpp"

#include "device/interpret.cuh"
#include "device/run_cpu.hpp"

namespace unisono::cuda::emulated {

namespace {

constexpr std::string_view image_name = "unisono-emulated ";
// Which one is launched, the flags of the call tell.
constexpr std::string_view kernel_names[] = {"unisono_interpret", "unisono_exchange"};
constexpr std::size_t longest_numbers = 8;

// Of the kernel, as compiled for a device: device/kernel.cu.
constexpr int most_threads = 512, registers = 64, shared_memory = sizeof(device::BlockMemory<device::CpuTarget::Vector>);

// Whether text begins with a name; of other images no byte is read beyond the difference.
bool begins_with(const char *text, std::string_view name) {
  return std::strncmp(text, name.data(), name.size()) == 0;
}

bool parse(const char *numbers, ModuleState &module) {
  const char *const end = numbers + ::strnlen(numbers, longest_numbers);
  unsigned dtype = 0, op = 0;
  const auto first = std::from_chars(numbers, end, dtype);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != ' ')
    return false;
  const auto second = std::from_chars(first.ptr + 1, end, op);
  if (second.ec != std::errc() || *second.ptr != '\0')
    return false;
  if (dtype >= unsigned(DType::count) || op >= unsigned(Op::count))
    return false;
  module.dtype = DType(dtype);
  module.op = Op(op);
  return device::runs_on_cpu(module.dtype, module.op);
}

// Whether the device reaches the words and windows of all ranks, as the kernel does.
bool words_are_reachable(State &state, int device, const device::Launch &launch) {
  const std::lock_guard lock(state.mutex);
  return std::all_of(launch.peers, launch.peers + launch.n, [&](const device::Peer &peer) {
    return reachable(state, device, Address(peer.words)) &&
           reachable(state, device, Address(peer.windows)) &&
           (peer.packets == nullptr || reachable(state, device, Address(peer.packets)));
  });
}

} // namespace

namespace {

// CUDA loads a function when it is first used.
Result load(Entry &at, FunctionState &function) {
  if (function.loaded)
    return success;
  if (const Result refused = at.state.streams->refuse_unsafe())
    return refused;
  const int device = function.module->device;
  if (const Result failed = at.state.streams->wait_where_allowed(at.lock, device))
    return failed;
  function.loaded = true;
  return success;
}

} // namespace

Result cuModuleLoadData(Module *module, const void *image) {
  return with_context([&](Entry &at) -> Result {
    if (module == nullptr || image == nullptr)
      return invalid_value;
    const char *const text = static_cast<const char *>(image);
    if (begins_with(text, "\177ELF")) // for a real device
      return no_binary_for_gpu;
    auto made = std::make_shared<ModuleState>();
    made->device = at.device;
    if (const Result refused = at.state.streams->refuse_unsafe())
      return refused;
    if (const Result failed = at.state.streams->wait_for_kernels(at.lock, at.device))
      return failed;
    if (!begins_with(text, image_name) || !parse(text + image_name.size(), *made))
      return invalid_image;
    *module = at.state.modules.add(std::move(made));
    return success;
  });
}

Result cuModuleUnload(Module handle) {
  return with_context([&](Entry &at) -> Result {
    if (const Result refused = at.state.streams->refuse_unsafe())
      return refused;
    const auto module = at.state.modules.take(handle);
    if (module == nullptr)
      return invalid_handle;
    at.state.functions.erase_if([&](const FunctionState &f) { return f.module == module; });
    return success;
  });
}

Result cuModuleGetFunction(Function *function, Module handle, const char *name) {
  return with_context([&](Entry &at) -> Result {
    const auto module = at.state.modules.find(handle);
    if (module == nullptr)
      return invalid_handle;
    if (name == nullptr || std::ranges::find(kernel_names, name) == std::end(kernel_names))
      return not_found;
    *function = at.state.functions.add(std::make_shared<FunctionState>(FunctionState{module}));
    return success;
  });
}

Result cuFuncLoad(Function handle) {
  return with_context([&](Entry &at) -> Result {
    const auto function = at.state.functions.find(handle);
    return function == nullptr ? Result(invalid_handle) : load(at, *function);
  });
}

Result cuFuncGetAttribute(int *value, int attribute, Function handle) {
  return with_context([&](Entry &at) -> Result {
    const auto function = at.state.functions.find(handle);
    if (function == nullptr)
      return invalid_handle;
    if (const Result failed = load(at, *function))
      return failed;
    switch (attribute) {
    case 0: *value = most_threads; return success;  // of a block
    case 1: *value = shared_memory; return success; // bytes
    case 2: *value = 0; return success;             // bytes of constants
    case 3: *value = 0; return success;             // bytes of local memory
    case function_registers: *value = registers; return success; // of a thread
    case 5:                                         // versions of the code
    case 6: *value = 90; return success;
    default: return invalid_value;
    }
  });
}

Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Function function, int threads,
                                                   std::size_t shared_bytes) {
  return with_context([&](Entry &at) -> Result {
    if (at.state.functions.find(function) == nullptr)
      return invalid_handle;
    if (threads <= 0)
      return invalid_value;
    const int whole = (threads + 31) / 32 * 32; // warps
    const std::size_t memory = std::size_t(shared_memory) + shared_bytes + 1024;
    *blocks = whole > most_threads
                  ? 0
                  : std::min({65536 / (registers * whole), 2048 / whole, 32,
                              int((std::size_t(228) << 10) / memory)});
    return success;
  });
}

Result cuLaunchKernel(Function handle, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,
                      unsigned threads_x, unsigned threads_y, unsigned threads_z,
                      unsigned shared_bytes, Stream stream_handle, void **arguments,
                      void **extra) {
  return with_context([&](Entry &at) -> Result {
    const auto function = at.state.functions.find(handle);
    const auto stream = at.state.streams->find(at, stream_handle);
    if (function == nullptr || stream == nullptr ||
        stream->queue->device != function->module->device)
      return invalid_handle;
    if (extra != nullptr)
      return not_supported;
    // The kernel has words for so many blocks, in one dimension.
    if (arguments == nullptr || arguments[0] == nullptr || blocks_x == 0 || blocks_y != 1 ||
        blocks_z != 1 || threads_x == 0 || threads_y != 1 || threads_z != 1 ||
        blocks_x > unsigned(device::most_blocks) || threads_x > 1024)
      return invalid_value;
    if (threads_x > unsigned(most_threads) || shared_bytes > (48u << 10) - shared_memory)
      return launch_out_of_resources;
    if (const Result failed = load(at, *function))
      return failed;
    at.state.streams->wait_to_launch(at.lock);
    device::Launch launch;
    std::memcpy(&launch, arguments[0], sizeof(launch));
    const int blocks = int(blocks_x);
    const int threads = std::min(int(threads_x), at.state.settings.threads);
    const DType dtype = function->module->dtype;
    const Op op = function->module->op;
    State &state = at.state;
    const int number = stream->queue->device;
    return state.streams->submit(
        *stream,
        [&state, number, launch, blocks, threads, dtype, op](device::CpuThreads &pool) -> Result {
          if (!words_are_reachable(state, number, launch))
            return illegal_address;
          return device::run_on_cpu(pool, launch, blocks, threads, dtype, op)
                     ? success
                     : Result(launch_failed);
        });
  });
}

} // namespace unisono::cuda::emulated
