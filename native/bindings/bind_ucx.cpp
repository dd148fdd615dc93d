// Bindings of UCX: its library, the worker of a rank, and its wires.

#include "bindings/bind.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/ucx_holder.hpp"
#include "bindings/wire_holder.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

struct UcxWireHolder : WireHolder {
  using WireHolder::WireHolder;
};

// Loading also makes what the process keeps for all of its wires.
std::string load(const std::vector<std::string> &paths) {
  std::string why = ucx::load(paths);
  if (why.empty())
    (void)ready_now();
  return why;
}

void make(UcxHolder *self) {
  std::shared_ptr<UcxWorker> made;
  {
    nb::gil_scoped_release unlocked;
    made = make_fork_safe<UcxWorker>();
  }
  new (self) UcxHolder{std::move(made)};
}

void close(UcxHolder &self, double timeout_s) {
  nb::gil_scoped_release unlocked;
  self.worker->close(std::int64_t(timeout_s * 1e9));
}

void make_wire(UcxWireHolder *self, const UcxHolder &of, int fd,
               const std::vector<nb::bytes> &keys) {
  if (keys.size() != 4)
    throw nb::value_error("a wire of UCX has 4 keys");
  const UcxKeys given{key_of(keys[0]), key_of(keys[1]), key_of(keys[2]), key_of(keys[3])};
  new (self) UcxWireHolder(std::make_unique<UcxWire>(of.worker, fd, given));
}

const WireKind kind("UcxWire", [](nb::module_ &m, const char *name) {
  m.def("load_ucx", &load, nb::arg("paths"), nb::call_guard<nb::gil_scoped_release>());
  m.def("ucx_version", [] { // and where it was loaded from
    const ucx::Api &api = ucx::api();
    return std::make_tuple(api.major, api.minor, api.release, api.path);
  });
  nb::class_<UcxHolder>(m, "Ucx")
      .def("__init__", &make)
      .def("close", &close, nb::arg("timeout_s"))
      .def("num_links", [](const UcxHolder &self) { return self.worker->num_links(); })
      .def("refused", [](const UcxHolder &self) { return self.worker->refused(); });
  nb::class_<UcxWireHolder, WireHolder>(m, name)
      .def("__init__", &make_wire, nb::arg("ucx"), nb::arg("fd"), nb::arg("keys"));
});

} // namespace
