// Sends and receives of tensors as they are: what a type of element needs is asked of Python
// once.

#pragma once

#include <array>
#include <tuple>

#include <c10/core/ScalarType.h>

#include "hooks.hpp"
#include "pool.hpp"

namespace unisono {

// With Python's lock.
class MessageTable {
public:
  struct Entry {
    PyReference comm; // null until it is asked for
    int collective = 0, dtype = 0, times = 1;
  };

  const Entry &find(py::handle planned, bool sends, at::ScalarType type) {
    Entry &entry = table_[sends][std::size_t(type)];
    if (!entry.comm) {
      const py::object made = planned.attr("message_for")(sends ? "send" : "recv", type);
      auto [comm, collective, dtype, times] =
          made.cast<std::tuple<py::object, int, int, int>>();
      entry = {PyReference(std::move(comm)), collective, dtype, times};
    }
    return entry;
  }

private:
  std::array<std::array<Entry, std::size_t(at::ScalarType::NumOptions)>, 2> table_;
};

} // namespace unisono
