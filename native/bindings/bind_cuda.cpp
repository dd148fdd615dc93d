// Bindings of CUDA devices: memory, kernels, events, and communicators on a device.

#include "bindings/bind.hpp"

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/call_sites.hpp"
#include "bindings/handle.hpp"
#include "bindings/interpreter_lock.hpp"
#include "cuda/device_comm.hpp"
#include "cuda/staging.hpp"

namespace nb = nanobind;
using namespace unisono;
using namespace unisono::cuda;

namespace {

// The driver may wait for a kernel, which may wait for another thread's call.
using Unlocked = nb::call_guard<GilRelease>;

Stream stream_of(std::uint64_t handle) { return reinterpret_cast<Stream>(handle); }

template <class T> nb::bytes bytes_of(const T &value) {
  return nb::bytes(reinterpret_cast<const char *>(&value), sizeof value);
}

// What a device's memory is: the ordinal, the base and the size of its allocation.
std::tuple<int, Address, std::size_t> locate(Address address) {
  Device &device = device_of(address);
  const CurrentDevice current(device);
  const AddressRange range = range_of(address);
  return {device.ordinal(), range.base, range.bytes};
}

// What DLPack tells of an array, wherever it is: address, shape, strides in elements, code and
// bits of its type, kind and number of its device.
using DlpackView = std::tuple<std::uintptr_t, std::vector<std::size_t>,
                              std::vector<std::int64_t>, int, int, int, int>;
DlpackView dlpack_view(nb::object given) {
  const auto array = nb::cast<nb::ndarray<nb::ro>>(given);
  std::vector<std::size_t> shape;
  std::vector<std::int64_t> strides;
  for (std::size_t i = 0; i < array.ndim(); ++i) {
    shape.push_back(array.shape(i));
    strides.push_back(array.stride(i));
  }
  return {reinterpret_cast<std::uintptr_t>(array.data()), shape, strides,
          array.dtype().code, array.dtype().bits, array.device_type(), array.device_id()};
}

// Copies from or to memory of the host.
void check_range(const DeviceMemory &memory, std::size_t offset, std::size_t bytes) {
  if (offset > memory.bytes() || bytes > memory.bytes() - offset)
    throw std::out_of_range("more bytes than the memory has");
}

void write_memory(const DeviceMemory &memory, std::uintptr_t from, std::size_t bytes,
                  std::size_t offset) {
  GilRelease unlocked;
  check_range(memory, offset, bytes);
  memory.write(offset, reinterpret_cast<const void *>(from), bytes);
}

void read_memory(const DeviceMemory &memory, std::uintptr_t to, std::size_t bytes,
                 std::size_t offset) {
  GilRelease unlocked;
  check_range(memory, offset, bytes);
  memory.read(offset, reinterpret_cast<void *>(to), bytes);
}

// An event of a device: what was launched on a stream before it.
class CudaEvent {
public:
  // Recorded on a stream, if one is given.
  CudaEvent(int ordinal, std::optional<std::uint64_t> stream) : CudaEvent(Device::of(ordinal)) {
    const CurrentDevice current(device_);
    UNISONO_CUDA(cuEventCreate, &event_, event_without_timing);
    if (stream)
      UNISONO_CUDA(cuEventRecord, event_, stream_of(*stream));
  }
  ~CudaEvent() {
    if (event_ == nullptr)
      return;
    if (const CurrentDevice current(device_, std::nothrow); current)
      (void)api().cuEventDestroy_v2(event_);
  }
  CudaEvent(const CudaEvent &) = delete;
  void record(std::uint64_t stream) {
    const CurrentDevice current(device_);
    UNISONO_CUDA(cuEventRecord, event_, stream_of(stream));
  }
  bool query() {
    const CurrentDevice current(device_);
    const Result result = api().cuEventQuery(event_);
    if (result == not_ready)
      return false;
    check(result, "cuEventQuery");
    return true;
  }
  // Waits on the host, as precisely as the driver can.
  void synchronize() {
    const CurrentDevice current(device_);
    UNISONO_CUDA(cuEventSynchronize, event_);
  }
  // Lets what is launched on the stream from now on wait for it.
  void order(std::uint64_t stream) {
    const CurrentDevice current(device_);
    UNISONO_CUDA(cuStreamWaitEvent, stream_of(stream), event_, 0);
  }

private:
  explicit CudaEvent(Device &device) : device_(device) {} // without one
  Device &device_;
  cuda::Event event_ = nullptr;
};

class CudaStream {
public:
  // An urgent one shares no queue of the device with those of the default priority.
  CudaStream(int ordinal, bool urgent) : device_(Device::of(ordinal)) {
    const CurrentDevice current(device_);
    if (!urgent) {
      UNISONO_CUDA(cuStreamCreate, &stream_, stream_non_blocking);
      return;
    }
    int least = 0, greatest = 0;
    UNISONO_CUDA(cuCtxGetStreamPriorityRange, &least, &greatest);
    UNISONO_CUDA(cuStreamCreateWithPriority, &stream_, stream_non_blocking, greatest);
  }
  ~CudaStream() {
    if (const CurrentDevice current(device_, std::nothrow); current)
      (void)api().cuStreamDestroy_v2(stream_);
  }
  CudaStream(const CudaStream &) = delete;
  std::uint64_t handle() const { return reinterpret_cast<std::uintptr_t>(stream_); }

private:
  Device &device_;
  Stream stream_ = nullptr;
};

std::shared_ptr<DeviceComm> make_comm(Handle &comm, int ordinal,
                                      std::size_t half, std::size_t owner,
                                      std::uint64_t segment) {
  auto board = comm.host_peers().find(owner, segment);
  if (!board || board->size() < DeviceComm::board_bytes(comm.size()))
    throw nb::value_error("the board of a device communicator is missing or too small");
  return {new DeviceComm(comm, Device::of(ordinal), half, std::move(board),
                         &comm.timeout),
          &DeviceComm::release};
}

std::string connect(DeviceComm &comm, const std::vector<nb::bytes> &announced) {
  std::vector<Announcement> ranks(announced.size());
  for (std::size_t q = 0; q < ranks.size(); ++q) {
    if (announced[q].size() != sizeof(Announcement))
      throw nb::value_error("an announcement of a device communicator has the wrong size");
    std::memcpy(&ranks[q], announced[q].c_str(), sizeof(Announcement));
  }
  GilRelease unlocked;
  return comm.connect(ranks);
}

std::optional<std::uint64_t> launch(DeviceComm &comm, DevicePlan &plan,
                                    const cuda::Kernel &kernel, Address input, Address output,
                                    std::uint64_t stream, std::uint64_t current,
                                    std::int64_t timeout_ns, int blocks, int threads,
                                    bool packets, bool queued, std::size_t kept) {
  const std::uint32_t site = call_site_here();
  GilRelease unlocked;
  return comm.launch({&plan, &kernel, input, output, stream_of(stream), stream_of(current),
                      timeout_ns, blocks, threads, packets, site, queued, kept});
}

void bind_staging(nb::module_ &m) {
  nb::class_<Staging>(m, "CudaStaging")
      .def("__init__",
           [](Staging *self, Handle &comm, int ordinal, std::uint64_t segment) {
             GilRelease unlocked;
             const auto memory = comm.host_peers().find(comm.host_peers().rank(), segment);
             if (!memory || memory->size() <= Staging::header)
               throw nb::value_error("the memory of a staging is missing or too small");
             new (self) Staging(Device::of(ordinal), memory);
           },
           nb::arg("comm"), nb::arg("ordinal"), nb::arg("segment"))
      .def_prop_ro("address",
                   [](const Staging &s) { return reinterpret_cast<std::uintptr_t>(s.host()); })
      .def_prop_ro("ended", &Staging::ended)
      .def("begin", &Staging::begin, Unlocked())
      .def("wait_on",
           [](Staging &s, std::uint64_t stream, std::uint32_t number) {
             s.await(stream_of(stream), number);
           },
           nb::arg("stream"), nb::arg("number"), Unlocked())
      .def("end_on",
           [](Staging &s, std::uint64_t stream, std::uint32_t number) {
             s.end(stream_of(stream), number);
           },
           nb::arg("stream"), nb::arg("number"), Unlocked())
      .def("end_now", &Staging::end_now, nb::arg("number"))
      .def("to_host",
           [](const Staging &s, std::size_t offset, Address from, std::size_t bytes,
              std::uint64_t stream) { s.to_host(offset, from, bytes, stream_of(stream)); },
           nb::arg("offset"), nb::arg("address"), nb::arg("bytes"), nb::arg("stream"),
           Unlocked())
      .def("to_device",
           [](const Staging &s, Address to, std::size_t offset, std::size_t bytes,
              std::uint64_t stream) { s.to_device(to, offset, bytes, stream_of(stream)); },
           nb::arg("address"), nb::arg("offset"), nb::arg("bytes"), nb::arg("stream"),
           Unlocked())
      .def("spoil",
           [](const Staging &s, Address to, std::size_t bytes, std::uint64_t stream) {
             s.spoil(to, bytes, stream_of(stream));
           },
           nb::arg("address"), nb::arg("bytes"), nb::arg("stream"), Unlocked())
      .def("is_capturing",
           [](const Staging &s, std::uint64_t stream) {
             return s.is_capturing(stream_of(stream));
           },
           nb::arg("stream"), Unlocked());
  m.attr("STAGING_HEADER") = Staging::header;
}

} // namespace

void bind_cuda(nb::module_ &m) {
  nb::exception<Error>(m, "CudaError", PyExc_RuntimeError);
  m.attr("MOST_DEVICE_BLOCKS") = device::most_blocks;
  m.attr("MOST_PACKET_BLOCKS") = device::packet_blocks;
  m.attr("PACKET_THREADS") = device::packet_threads;
  m.def("packets_fit", &device::packets_fit, nb::arg("places"), nb::arg("piece"),
        nb::arg("itemsize"), nb::arg("blocks"));
  m.attr("MOST_DEVICE_RANKS") = device::most_ranks;
  m.attr("DEVICE_CALL") = device_call;
  m.def("cuda_is_emulated", [] { return api().emulated; });
  m.def("cuda_is_used", &is_used);
  m.def("cuda_device_count", &Device::count);
  m.def("cuda_access", &Device::access);
  m.def("dlpack_view", &dlpack_view, nb::arg("array"));
  m.def("cuda_locate", &locate, nb::arg("address"));
  nb::class_<Device>(m, "CudaDevice")
      .def_prop_ro("ordinal", &Device::ordinal)
      .def_prop_ro("name", &Device::name)
      .def_prop_ro("uuid", [](const Device &d) { return bytes_of(d.uuid()); })
      .def_prop_ro("capability", &Device::capability)
      .def_prop_ro("multiprocessors", &Device::multiprocessors)
      .def_prop_ro("memory", &Device::memory)
      .def_prop_ro("has_mps", &Device::has_mps)
      .def("can_access",
           [](const Device &d, const Device &peer) { return d.can_access(peer); },
           nb::arg("peer"));
  m.def("cuda_copy_seconds",
        [](int ordinal, std::size_t bytes, int repeats) {
          return copy_seconds(Device::of(ordinal), bytes, repeats);
        },
        nb::arg("ordinal"), nb::arg("bytes"), nb::arg("repeats"), Unlocked());
  m.def("cuda_device", &Device::of, nb::arg("ordinal"), nb::rv_policy::reference);
  nb::class_<DeviceMemory>(m, "CudaMemory")
      .def("__init__",
           [](DeviceMemory *self, int ordinal, std::size_t bytes) {
             GilRelease unlocked;
             new (self) DeviceMemory(Device::of(ordinal), bytes);
           },
           nb::arg("ordinal"), nb::arg("bytes"))
      .def_prop_ro("address", &DeviceMemory::address)
      .def_prop_ro("bytes", &DeviceMemory::bytes)
      .def("write", &write_memory, nb::arg("address"), nb::arg("bytes"),
           nb::arg("offset") = 0)
      .def("read", &read_memory, nb::arg("address"), nb::arg("bytes"),
           nb::arg("offset") = 0);
  nb::class_<CudaEvent>(m, "CudaEvent")
      .def(nb::init<int, std::optional<std::uint64_t>>(), nb::arg("ordinal"),
           nb::arg("stream") = nb::none(), Unlocked())
      .def("record", &CudaEvent::record, nb::arg("stream"), Unlocked())
      .def("query", &CudaEvent::query, Unlocked())
      .def("synchronize", &CudaEvent::synchronize, Unlocked())
      .def("order", &CudaEvent::order, nb::arg("stream"), Unlocked());
  nb::class_<CudaStream>(m, "CudaStream")
      .def(nb::init<int, bool>(), nb::arg("ordinal"), nb::arg("urgent") = false, Unlocked())
      .def_prop_ro("handle", &CudaStream::handle);
  nb::class_<unisono::cuda::Kernel>(m, "CudaKernel")
      .def("__init__",
           [](cuda::Kernel *self, int ordinal, nb::bytes image) {
             const char *bytes = image.c_str();
             GilRelease unlocked;
             new (self) cuda::Kernel(Device::of(ordinal), bytes);
           },
           nb::arg("ordinal"), nb::arg("image"));
  nb::class_<DevicePlan>(m, "DevicePlan")
      .def("__init__",
           [](DevicePlan *self, DeviceComm &comm, const PlanHolder &plan) {
             GilRelease unlocked;
             new (self) DevicePlan(comm.tables(), plan.plan);
           },
           nb::arg("comm"), nb::arg("plan"))
      .def("fits_packets",
           [](const DevicePlan &plan, int blocks) { return plan.packed().fits_packets(blocks); },
           nb::arg("blocks"));
  nb::class_<DeviceComm>(m, "DeviceComm")
      .def("allocate", &DeviceComm::allocate, Unlocked())
      .def("announcement", [](DeviceComm &c) { return bytes_of(c.announcement()); })
      .def("connect", &connect, nb::arg("announced"))
      .def("disconnect", &DeviceComm::disconnect, Unlocked())
      .def("place_on_host", &DeviceComm::place_on_host, nb::arg("owner"), nb::arg("segment"),
           Unlocked())
      .def("start", &DeviceComm::start, Unlocked())
      .def("launch", &launch, nb::arg("plan"), nb::arg("kernel"), nb::arg("input"),
           nb::arg("output"), nb::arg("stream"), nb::arg("current"), nb::arg("timeout_ns"),
           nb::arg("blocks"), nb::arg("threads"), nb::arg("packets"), nb::arg("queued"),
           nb::arg("kept"))
      .def("ended", &DeviceComm::ended)
      .def("sharing_of", [](DeviceComm &c, Address address, std::size_t bytes) {
             return int(c.sharing_of(address, bytes));
           },
           nb::arg("address"), nb::arg("bytes"), Unlocked())
      .def("exposed", &DeviceComm::exposed)
      .def("is_idle", &DeviceComm::is_idle, Unlocked())
      .def("ranks_here", &DeviceComm::ranks_here)
      .def("look", &DeviceComm::look, Unlocked())
      .def("close", &DeviceComm::close, Unlocked());
  m.def("device_board_bytes", &DeviceComm::board_bytes, nb::arg("n"));
  m.def("device_host_bytes", &DeviceComm::host_bytes, nb::arg("n"), nb::arg("half"));
  m.def("make_device_comm", &make_comm, nb::arg("comm"), nb::arg("ordinal"), nb::arg("half"),
        nb::arg("owner"), nb::arg("segment"), nb::keep_alive<0, 1>(),
        Unlocked());
  bind_staging(m);
}
