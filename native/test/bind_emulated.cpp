// CUDA's driver for tests: the functions of its emulation, which tests call through ctypes;
// how a driver is opened; and the launches of a plan.

#include <cstdint>
#include <string>

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include "bindings/handle.hpp"
#include "cuda/device.hpp"
#include "cuda/emulated.hpp"
#include "device/tables.hpp"
#include "test/bind_test_hooks.hpp"

namespace nb = nanobind;
using namespace unisono;
using namespace unisono::device;

namespace {

nb::typed<nb::dict, nb::str, int> functions() {
  const cuda::Api api = cuda::emulated_api();
  nb::dict found;
#define UNISONO_CUDA_ADDRESS(name, arguments)                                                  \
  found[#name] = reinterpret_cast<std::uintptr_t>(api.name);
  UNISONO_CUDA_ALL_FUNCTIONS(UNISONO_CUDA_ADDRESS)
#undef UNISONO_CUDA_ADDRESS
  return found;
}

nb::bytes bytes_of(const void *data, std::size_t size) {
  return nb::bytes(static_cast<const char *>(data), size);
}

nb::bytes tables(const PlanHolder &plan) {
  const PackedPlan packed(plan.plan);
  return bytes_of(packed.bytes().data(), packed.bytes().size());
}

// Where things are on the device, and what is said of them.
struct Places {
  std::uint64_t tables = 0, peers = 0, input = 0, output = 0, abort = 0, failure = 0,
                done = 0;
  std::uint64_t half = 0, flags = 0, timeout_ns = 0;
  int blocks = 2; // of the launch
};

template <class T> T *at(std::uint64_t address) { return reinterpret_cast<T *>(address); }

// The argument of the kernel. Buffers are in segment 0, which begins at address 0.
nb::bytes launch(const PlanHolder &plan, std::size_t rank, std::size_t n,
                 const Places &places) {
  const PackedPlan packed(plan.plan);
  Launch made = packed.launch(at<const std::byte>(places.tables), rank, n, places.blocks);
  made.input = at<const unsigned char>(places.input);
  made.output = at<unsigned char>(places.output);
  made.offset[0] = places.input;
  made.offset[1] = places.output;
  made.flags = places.flags;
  made.peers = at<const Peer>(places.peers);
  made.words = made.peers[rank].words;
  made.half = std::int64_t(places.half);
  made.abort = at<const std::uint32_t>(places.abort);
  made.failure = at<FailureSlot>(places.failure);
  made.done = at<std::uint64_t>(places.done);
  made.timeout_ns = places.timeout_ns;
  return bytes_of(&made, sizeof(made));
}

} // namespace

void bind_emulated(nb::module_ &m) {
  m.def("emulated_functions", &functions);
  m.def("emulated_objects", &cuda::emulated::objects);
  m.def("release_freed_memory", [](int ordinal) {
    cuda::Device &device = cuda::Device::of(ordinal);
    device.freed().release_all(device);
  }, nb::arg("ordinal"));
  m.def("emulated_calls", &cuda::emulated::all_calls);
  m.def("emulated_calls_of", [](const std::string &name) {
    return cuda::emulated::calls_of(name);
  }, nb::arg("name"));
  m.def("fail_emulated_call", [](const std::string &name, int number, int failure) {
    return cuda::emulated::fail_call(name, number, failure);
  }, nb::arg("name"), nb::arg("number"), nb::arg("failure"));
  m.def("cuda_driver_is_emulated", [] { return cuda::api().emulated; });
  m.def("check_cuda", &cuda::check, nb::arg("result"), nb::arg("function"));
  m.def("device_tables", &tables, nb::arg("plan"));
  m.def("device_launch", &launch, nb::arg("plan"), nb::arg("rank"), nb::arg("n"),
        nb::arg("places"));
  m.def("device_words_size", [] { return sizeof(RankWords); });
  m.def("device_failure_size", [] { return sizeof(FailureSlot); });
  nb::class_<Places>(m, "DevicePlaces")
      .def(nb::init<>())
      .def_rw("tables", &Places::tables)
      .def_rw("peers", &Places::peers)
      .def_rw("input", &Places::input)
      .def_rw("output", &Places::output)
      .def_rw("abort", &Places::abort)
      .def_rw("failure", &Places::failure)
      .def_rw("done", &Places::done)
      .def_rw("half", &Places::half)
      .def_rw("flags", &Places::flags)
      .def_rw("timeout_ns", &Places::timeout_ns)
      .def_rw("blocks", &Places::blocks);
}
