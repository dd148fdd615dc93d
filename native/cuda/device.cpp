#include "cuda/device.hpp"

#include <cstring>
#include <map>
#include <utility>

#include "cuda/deferred_release.hpp"

namespace unisono::cuda {

namespace {

constexpr Result already_enabled = 704; // peer access
constexpr Result out_of_memory = 2, too_many_connections = 809;

void initialize() {
  (void)api(); // throws if there is no driver
  refuse_fork();
  mark_used();
  static const bool once = [] {
    UNISONO_CUDA(cuInit, 0);
    return true;
  }();
  (void)once;
}

// Whether something in this process uses the device already.
bool is_active(int ordinal) {
  DeviceNumber number = 0;
  unsigned flags = 0;
  int active = 0;
  UNISONO_CUDA(cuDeviceGet, &number, ordinal);
  UNISONO_CUDA(cuDevicePrimaryCtxGetState, number, &flags, &active);
  return active != 0;
}

int attribute(DeviceNumber device, int which) {
  int value = 0;
  UNISONO_CUDA(cuDeviceGetAttribute, &value, which, device);
  return value;
}

Uuid uuid_of(DeviceNumber device) {
  Uuid uuid{};
  UNISONO_CUDA(cuDeviceGetUuid_v2, &uuid, device);
  return uuid;
}

bool is_equal(const Uuid &a, const Uuid &b) {
  return std::memcmp(a.bytes, b.bytes, sizeof a.bytes) == 0;
}

// The devices that this process sees.
std::vector<DeviceNumber> numbers() {
  std::vector<DeviceNumber> found(std::size_t(Device::count()));
  for (std::size_t i = 0; i < found.size(); ++i)
    UNISONO_CUDA(cuDeviceGet, &found[i], int(i));
  return found;
}

bool can_access_peer(DeviceNumber device, DeviceNumber peer) {
  int can = device == peer;
  if (device != peer)
    UNISONO_CUDA(cuDeviceCanAccessPeer, &can, device, peer);
  return can != 0;
}

// Whether it is set; drivers that do not know the attribute do not have it.
bool flag(DeviceNumber device, int which) {
  int value = 0;
  return api().cuDeviceGetAttribute(&value, which, device) == success && value != 0;
}

// The primary context. Under MPS the processes share the queues of a device: one that comes
// when none is left gets no context, for which the driver has two errors.
Context retained(DeviceNumber number) {
  refuse_fork();
  Context context = nullptr;
  const Result result = api().cuDevicePrimaryCtxRetain(&context, number);
  if (result == out_of_memory || result == too_many_connections)
    throw Error(in_words(result, "cuDevicePrimaryCtxRetain") +
                    "; either the device's memory is taken, or, under MPS, its queues are, "
                    "about 120: then set CUDA_DEVICE_MAX_CONNECTIONS in every process that "
                    "uses it, to what all of them can have (2 if it is not set)",
                result);
  check(result, "cuDevicePrimaryCtxRetain");
  return context;
}

} // namespace

int Device::count() {
  initialize();
  int count = 0;
  UNISONO_CUDA(cuDeviceGetCount, &count);
  return count;
}

std::vector<std::vector<bool>> Device::access() {
  std::vector<std::vector<bool>> found;
  const auto all = numbers();
  for (const DeviceNumber device : all) {
    found.emplace_back();
    for (const DeviceNumber peer : all)
      found.back().push_back(can_access_peer(device, peer));
  }
  return found;
}

Device &Device::of(int ordinal) {
  refuse_fork();
  static std::mutex mutex;
  static auto &known = *new std::map<int, std::unique_ptr<Device>>; // never destroyed
  const std::lock_guard lock(mutex);
  auto &found = known[ordinal];
  if (!found)
    found = std::make_unique<Device>(ordinal);
  return *found;
}

Device::Device(int ordinal) : Device(ordinal, Empty()) {
  initialize();
  const RelaxedCapture relaxed;
  UNISONO_CUDA(cuDeviceGet, &number_, ordinal);
  context_ = retained(number_);
  char name[256] = {};
  UNISONO_CUDA(cuDeviceGetName, name, sizeof name, number_);
  name_ = name;
  uuid_ = uuid_of(number_);
  UNISONO_CUDA(cuDeviceTotalMem_v2, &memory_, number_);
  capability_ = attribute(number_, attribute_major) * 10 + attribute(number_, attribute_minor);
  multiprocessors_ = attribute(number_, attribute_multiprocessors);
  has_mps_ = flag(number_, attribute_mps);
  const CurrentDevice current(*this);
  UNISONO_CUDA(cuStreamCreate, &copies_, stream_non_blocking);
}

Device::~Device() {
  if (context_ == nullptr)
    return;
  if (copies_ != nullptr)
    if (const CurrentDevice current(*this, std::nothrow); current)
      (void)api().cuStreamDestroy_v2(copies_);
  (void)api().cuDevicePrimaryCtxRelease_v2(number_);
}

void Device::write(Address to, const void *from, std::size_t bytes) {
  copy(to, reinterpret_cast<Address>(from), bytes);
}

void Device::read(void *to, Address from, std::size_t bytes) {
  copy(reinterpret_cast<Address>(to), from, bytes);
}

void Device::copy(Address to, Address from, std::size_t bytes) {
  refuse_fork();
  const std::lock_guard only(copying_);
  const CurrentDevice current(*this);
  UNISONO_CUDA(cuMemcpyAsync, to, from, bytes, copies_);
  UNISONO_CUDA(cuStreamSynchronize, copies_);
}

bool Device::can_access(const Uuid &peer) const {
  for (const DeviceNumber number : numbers())
    if (is_equal(uuid_of(number), peer))
      return can_access_peer(number_, number);
  return true;
}

void Device::enable_access(const Device &peer) {
  if (peer.number_ == number_)
    return;
  const CurrentDevice current(*this);
  const Result result = api().cuCtxEnablePeerAccess(peer.context_, 0);
  if (result != already_enabled)
    check(result, "cuCtxEnablePeerAccess");
}

void Device::clear(Address to, std::size_t bytes) {
  refuse_fork();
  const std::lock_guard only(copying_);
  const CurrentDevice current(*this);
  UNISONO_CUDA(cuMemsetD8Async, to, 0, bytes, copies_);
  UNISONO_CUDA(cuStreamSynchronize, copies_);
}

RelaxedCapture::RelaxedCapture() noexcept : before_(capture_relaxed) {
  if (is_used_before() || api().cuThreadExchangeStreamCaptureMode(&before_) != success)
    before_ = -1;
}

RelaxedCapture::~RelaxedCapture() {
  if (before_ >= 0)
    (void)api().cuThreadExchangeStreamCaptureMode(&before_);
}

CurrentDevice::CurrentDevice(const Device &device) : pushed_(true) {
  UNISONO_CUDA(cuCtxPushCurrent_v2, device.context());
}

CurrentDevice::CurrentDevice(const Device &device, std::nothrow_t) noexcept
    : pushed_(!is_used_before() && api().cuCtxPushCurrent_v2(device.context()) == success) {}

CurrentDevice::~CurrentDevice() {
  Context popped;
  if (!pushed_)
    return;
  (void)api().cuCtxPopCurrent_v2(&popped);
}

DeviceMemory::DeviceMemory(Device &device, std::size_t bytes) : DeviceMemory() {
  const CurrentDevice current(device);
  const std::size_t block = BlockCache::rounded(bytes);
  address_ = device.freed().take(block);
  if (address_ == 0) {
    Result result = api().cuMemAlloc_v2(&address_, block);
    if (result == out_of_memory) {
      device.freed().release_all(device);
      result = api().cuMemAlloc_v2(&address_, block);
    }
    check(result, "cuMemAlloc_v2");
  }
  device_ = &device;
  bytes_ = bytes;
  device.clear(address_, bytes);
}

DeviceMemory::~DeviceMemory() {
  if (device_ != nullptr && !is_used_before())
    device_->freed().put(*device_, address_, BlockCache::rounded(bytes_));
}

DeviceMemory::DeviceMemory(DeviceMemory &&other) noexcept { *this = std::move(other); }

DeviceMemory &DeviceMemory::operator=(DeviceMemory &&other) noexcept {
  std::swap(device_, other.device_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void DeviceMemory::write(std::size_t offset, const void *from, std::size_t bytes) const {
  device_->write(address_ + offset, from, bytes);
}

void DeviceMemory::read(std::size_t offset, void *to, std::size_t bytes) const {
  device_->read(to, address_ + offset, bytes);
}

std::unique_ptr<ImportedMemory> ImportedMemory::open(const Device &device,
                                                     const IpcHandle &handle,
                                                     Result &result) {
  std::unique_ptr<ImportedMemory> made(new ImportedMemory(device));
  const CurrentDevice current(device);
  result = api().cuIpcOpenMemHandle_v2(&made->address_, handle, ipc_lazy_peer_access);
  return result == success ? std::move(made) : nullptr;
}

ImportedMemory::~ImportedMemory() {
  if (address_ == 0)
    return;
  if (const CurrentDevice current(device_, std::nothrow); current)
    (void)api().cuIpcCloseMemHandle(address_);
}

PinnedMemory::PinnedMemory(const Device &device, std::size_t bytes) : PinnedMemory(device) {
  const CurrentDevice current(device);
  UNISONO_CUDA(cuMemHostAlloc, &host_, bytes, host_mapped | host_portable);
  std::memset(host_, 0, bytes);
  UNISONO_CUDA(cuMemHostGetDevicePointer_v2, &address_, host_, 0);
}

PinnedMemory::~PinnedMemory() {
  if (host_ == nullptr)
    return;
  release_later([&device = device_, host = host_] {
    if (const CurrentDevice current(device, std::nothrow); current)
      (void)api().cuMemFreeHost(host);
  });
}

DeviceEvent::DeviceEvent(const Device &device) : device_(device) {
  const CurrentDevice current(device);
  UNISONO_CUDA(cuEventCreate, &event_, event_without_timing);
}

DeviceEvent::~DeviceEvent() {
  if (const CurrentDevice current(device_, std::nothrow); current)
    (void)api().cuEventDestroy_v2(event_);
}

// The driver answers in any context of the process, but wants one to be current; some versions
// answer in a context of the same device alone.
Device &device_of(Address address) {
  initialize();
  int ordinal = 0;
  Result result = api().cuPointerGetAttribute(&ordinal, pointer_device, address);
  for (int i = 0; i < Device::count() && result != success; ++i)
    if (is_active(i)) {
      const CurrentDevice current(Device::of(i));
      result = api().cuPointerGetAttribute(&ordinal, pointer_device, address);
    }
  check(result, "cuPointerGetAttribute");
  return Device::of(ordinal);
}

AddressRange range_of(Address address) {
  AddressRange range;
  UNISONO_CUDA(cuMemGetAddressRange_v2, &range.base, &range.bytes, address);
  return range;
}

} // namespace unisono::cuda
