// What Python holds of a wire, until a stream or a lifeline takes it over. Not the Wire
// itself: then the last reference would be Python's, whichever thread lets go of it.
//
// A file that adds a kind of wire binds it by itself:
//
//   const WireKind kind([](nb::module_ &m) {
//     nb::class_<MyHolder, WireHolder>(m, "MyWire").def(...);
//   });

#pragma once

#include <memory>
#include <utility>

#include <nanobind/nanobind.h>

#include "net/wire.hpp"

class WireHolder {
public:
  explicit WireHolder(std::unique_ptr<unisono::Wire> wire) : wire_(std::move(wire)) {}

  // The wire; ValueError if it has been taken over, or closed.
  std::unique_ptr<unisono::Wire> &held() {
    if (!wire_)
      throw nanobind::value_error("this wire has been attached or closed");
    return wire_;
  }
  void close() { wire_.reset(); }

private:
  std::unique_ptr<unisono::Wire> wire_;
};

// A kind of wire that is bound when the module is made. For objects with static storage.
class WireKind {
public:
  using Bind = void (*)(nanobind::module_ &);
  explicit WireKind(Bind bind) : bind_(bind), next_(std::exchange(first, this)) {}
  static void bind_all(nanobind::module_ &m) {
    for (const WireKind *kind = first; kind != nullptr; kind = kind->next_)
      kind->bind_(m);
  }

private:
  static inline const WireKind *first = nullptr;
  const Bind bind_;
  const WireKind *const next_;
};
