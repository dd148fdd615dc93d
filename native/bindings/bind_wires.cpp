// The Python face of wires: how they are made, and what Python does with one that is not
// attached yet.

#include "bindings/bind.hpp"

#include <algorithm>
#include <cerrno>
#include <vector>

#include "bindings/wire_holder.hpp"
#include "net/socket_wire.hpp"
#include "net/tls_wire.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

struct SocketWireHolder : WireHolder {
  using WireHolder::WireHolder;
};
struct TlsWireHolder : WireHolder {
  using WireHolder::WireHolder;
};

ssize_t checked(ssize_t count) {
  if (count >= 0)
    return count;
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

std::size_t send(WireHolder &self, const nb::bytes &data) {
  const iovec part{const_cast<char *>(data.c_str()), data.size()};
  return std::size_t(checked(self.held()->send(&part, 1)));
}

nb::bytes receive(WireHolder &self, std::size_t most) {
  std::vector<char> into(std::clamp<std::size_t>(most, 1, 1 << 20));
  const ssize_t got = checked(self.held()->receive(into.data(), into.size()));
  return nb::bytes(into.data(), std::size_t(got));
}

// What to poll for, as pairs of a descriptor and events.
nb::list pairs(const std::vector<pollfd> &awaited) {
  nb::list all;
  for (const pollfd &one : awaited)
    all.append(nb::make_tuple(one.fd, one.events));
  return all;
}

nb::list await_send(WireHolder &self) {
  std::vector<pollfd> awaited;
  self.held()->await_send(awaited);
  return pairs(awaited);
}

nb::list await_receive(WireHolder &self, std::size_t bytes) {
  std::vector<pollfd> awaited;
  self.held()->await_receive(bytes, awaited);
  return pairs(awaited);
}

void make_socket_wire(SocketWireHolder *self, int fd) {
  new (self) SocketWireHolder(std::make_unique<SocketWire>(fd));
}

void make_tls_wire(TlsWireHolder *self, int fd, const TlsHolder &tls) {
  new (self) TlsWireHolder(std::make_unique<TlsWire>(fd, tls.tls));
}

} // namespace

void bind_wires(nb::module_ &m) {
  nb::class_<WireHolder>(m, "Wire")
      .def("send", &send, nb::arg("data"))
      .def("receive", &receive, nb::arg("most"))
      .def("await_send", &await_send)
      .def("await_receive", &await_receive, nb::arg("bytes"))
      .def("has_pending", [](WireHolder &self) { return self.held()->has_pending(); })
      .def("fileno", [](WireHolder &self) { return self.held()->descriptor(); })
      .def("finish_sending", [](WireHolder &self) { self.held()->finish_sending(); })
      .def("peer_closed", [](WireHolder &self) { return self.held()->peer_closed(); })
      .def("close", &WireHolder::close);
  nb::class_<SocketWireHolder, WireHolder>(m, "SocketWire")
      .def("__init__", &make_socket_wire, nb::arg("fd"));
  nb::class_<TlsWireHolder, WireHolder>(m, "TlsWire")
      .def("__init__", &make_tls_wire, nb::arg("fd"), nb::arg("tls"));
  WireKind::bind_all(m);
}
