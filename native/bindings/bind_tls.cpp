// Bindings of an encrypted connection: its handshake, and what is exchanged on it during
// the rendezvous. After that native code takes it over.

#include "bindings/bind.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

namespace nb = nanobind;
using unisono::Tls;

namespace {

// As for a socket: BlockingIOError, ConnectionResetError, or OSError with EBADMSG.
[[noreturn]] void raise_errno() {
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

void make(TlsHolder *self, int fd, const nb::bytes &key, bool dials, std::uint64_t lifetime) {
  Tls::Key bytes{};
  if (key.size() != bytes.size())
    throw nb::value_error("a key for TLS has 32 bytes");
  std::memcpy(bytes.data(), key.c_str(), bytes.size());
  const auto side = dials ? Tls::Side::client : Tls::Side::server;
  new (self) TlsHolder{std::make_shared<Tls>(fd, bytes, side, lifetime)};
}

int handshake(TlsHolder &self) {
  const int awaited = self.tls->handshake();
  if (awaited < 0)
    raise_errno();
  return awaited;
}

std::size_t send(TlsHolder &self, const nb::bytes &data) {
  const iovec part{const_cast<char *>(data.c_str()), data.size()};
  const ssize_t sent = self.tls->send(&part, 1);
  if (sent < 0)
    raise_errno();
  return std::size_t(sent);
}

nb::bytes receive(TlsHolder &self, std::size_t most) {
  std::vector<char> into(std::clamp<std::size_t>(most, 1, Tls::record_bytes));
  const ssize_t got = self.tls->recv(into.data(), into.size());
  if (got < 0)
    raise_errno();
  return nb::bytes(into.data(), std::size_t(got));
}

} // namespace

void bind_tls(nb::module_ &m) {
  m.def("tls_missing", [] { return Tls::missing(); });
  nb::class_<TlsHolder>(m, "Tls")
      .def("__init__", &make, nb::arg("fd"), nb::arg("key"), nb::arg("dials"),
           nb::arg("lifetime") = Tls::usual_lifetime)
      .def("handshake", &handshake)
      .def("send", &send, nb::arg("data"))
      .def("recv", &receive, nb::arg("most"))
      .def("has_pending", [](const TlsHolder &self) { return self.tls->has_pending(); })
      .def("key_updates", [](const TlsHolder &self) { return self.tls->key_updates(); });
}
