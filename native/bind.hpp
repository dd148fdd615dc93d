// The parts of the Python module, each registered by the file that defines it.

#pragma once

#include <memory>

#include <nanobind/nanobind.h>

#include "tls.hpp"

void bind_engine(nanobind::module_ &m);
void bind_tls(nanobind::module_ &m);
void bind_wire(nanobind::module_ &m);
void bind_simulate(nanobind::module_ &m);

// What Python holds of an encrypted connection, until native code takes it over. Not Tls
// itself: then the last reference would be Python's, whichever thread lets go of it.
struct TlsHolder {
  std::shared_ptr<unisono::Tls> tls;
};

inline std::shared_ptr<unisono::Tls> tls_of(const TlsHolder *holder) {
  return holder == nullptr ? nullptr : holder->tls;
}
