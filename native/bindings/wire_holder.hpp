// What Python holds of a wire, until a stream or a lifeline takes it over. Not the Wire
// itself: then the last reference would be Python's, whichever thread lets go of it.
//
// A file that adds a kind of wire binds it by itself:
//
//   const WireKind kind("MyWire", [](nb::module_ &m, const char *name) {
//     nb::class_<MyHolder, WireHolder>(m, name).def(...);
//   });

#pragma once

#include <memory>
#include <string_view>
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

// A kind of wire that is bound when the module is made, in the order of their names: that in
// which files are linked differs between builds. For objects with static storage.
class WireKind {
public:
  using Bind = void (*)(nanobind::module_ &, const char *);
  WireKind(const char *name, Bind bind) : name_(name), bind_(bind) {
    const WireKind **at = &first;
    while (*at != nullptr && (*at)->name_ < name_)
      at = &(*at)->next_;
    next_ = std::exchange(*at, this);
  }
  static void bind_all(nanobind::module_ &m) {
    for (const WireKind *kind = first; kind != nullptr; kind = kind->next_)
      kind->bind_(m, kind->name_.data());
  }

private:
  static inline const WireKind *first = nullptr;
  const std::string_view name_;
  const Bind bind_;
  mutable const WireKind *next_;
};
