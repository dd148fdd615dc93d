// Plans of plain calls, found by what the caller passed, without going through Python.
//
// A plain call on a NumPy array that has been made before needs no argument checked anew:
// the same element type, shape, operation and root lead to the same plan. NumPy's array
// object has kept its layout through all releases; it is read directly, after a trial at
// import has shown that it is as expected. If it is not, every call takes the long way.

#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/program.hpp"

namespace unisono {

// The head of NumPy's array object.
struct ArrayHead {
  PyObject_HEAD
  std::byte *data;
  int ndim;
  Py_ssize_t *shape;
  Py_ssize_t *strides;
  PyObject *base;
  PyObject *descr;
  int flags;
  static constexpr int contiguous = 0x1, aligned = 0x100, writable = 0x400;

  Py_ssize_t count() const {
    Py_ssize_t total = 1;
    for (int i = 0; i < ndim; ++i)
      total *= shape[i];
    return total;
  }
};

class Shortcuts {
public:
  // Believes the layout if it describes `probe`, a contiguous writable array.
  static bool learn(nanobind::handle type, nanobind::handle probe, std::uintptr_t data,
                    std::vector<Py_ssize_t> shape);
  static const ArrayHead *array(nanobind::handle x);

  struct Found {
    std::shared_ptr<const Plan> plan; // owned: another thread may forget it meanwhile
    const void *input = nullptr;
    void *output = nullptr;
  };
  // Without a plan where this call has not been remembered, or has to be looked at.
  Found find(int kind, nanobind::handle x, nanobind::handle out, nanobind::handle op,
             nanobind::handle root) const;
  void remember(int kind, nanobind::handle x, nanobind::handle out, nanobind::handle op,
                nanobind::handle root, std::shared_ptr<const Plan> plan);

private:
  static constexpr int most_axes = 8; // arrays with more take the long way
  struct Key {
    int kind = -1;
    int ndim = 0;
    const PyObject *descr = nullptr, *op = nullptr, *root = nullptr;
    Py_ssize_t out_rows = -1; // -1: none; its other axes are those of x
    std::array<Py_ssize_t, most_axes> shape; // of x, as far as ndim says
    bool operator==(const Key &other) const {
      return kind == other.kind && ndim == other.ndim && descr == other.descr &&
             op == other.op && root == other.root && out_rows == other.out_rows &&
             std::equal(shape.begin(), shape.begin() + ndim, other.shape.begin());
    }
  };
  struct Entry {
    Key key;
    std::shared_ptr<const Plan> plan;
    nanobind::object descr, op, root; // kept, so that their addresses stay theirs
  };
  static constexpr std::size_t size = 64;
  static std::size_t slot(const Key &key) {
    std::size_t mixed = std::size_t(key.kind);
    for (int i = 0; i < key.ndim; ++i)
      mixed = mixed * 31 + std::size_t(key.shape[std::size_t(i)]);
    mixed = mixed * 31 + reinterpret_cast<std::uintptr_t>(key.descr) / 16 +
            reinterpret_cast<std::uintptr_t>(key.op) / 16 * 7;
    return (mixed ^ mixed >> 17) % size;
  }
  static bool key_of(Key &key, int kind, nanobind::handle x, nanobind::handle out,
                     nanobind::handle op, nanobind::handle root);
  std::vector<Entry> entries_ = std::vector<Entry>(size);
};

} // namespace unisono
