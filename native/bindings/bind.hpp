// The parts of the Python module, each registered by the file that defines it.

#pragma once

#include <cstring>
#include <memory>

#include <nanobind/nanobind.h>

#include "net/frame.hpp"
#include "net/tls.hpp"
#include "net/wire.hpp"

void bind_program(nanobind::module_ &m);
void bind_lower(nanobind::module_ &m);
void bind_engine(nanobind::module_ &m);
void bind_work(nanobind::module_ &m);
void bind_comm(nanobind::module_ &m);
void bind_tls(nanobind::module_ &m);
void bind_wires(nanobind::module_ &m);
void bind_simulate(nanobind::module_ &m);
void bind_codec(nanobind::module_ &m);
void bind_cuda(nanobind::module_ &m);

// What Python holds of an encrypted connection until native code takes it over. Not Tls
// itself: its last reference must not be Python's, whichever thread releases it.
struct TlsHolder {
  std::shared_ptr<unisono::Tls> tls;
};

// A key as Python passes it.
inline unisono::Key key_of(const nanobind::bytes &bytes) {
  unisono::Key key;
  if (bytes.size() != key.size())
    throw nanobind::value_error("a key has 16 bytes");
  std::memcpy(key.data(), bytes.c_str(), key.size());
  return key;
}

