// Plans of plain calls, found by their arguments, without Python code.
//
// A plain call on a NumPy array that was made before needs no checks: the same element
// type, shape, operation and root lead to the same plan. The layout of NumPy's array object
// has not changed through all releases; it is read directly, after a check at import. If
// the check fails, every call takes the general path.

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

class PlanCache {
public:
  // Accepts the layout if it describes `probe`, a contiguous writable array.
  static bool learn(nanobind::handle type, nanobind::handle probe, std::uintptr_t data,
                    std::vector<Py_ssize_t> shape);
  static const ArrayHead *array(nanobind::handle x);

  struct Found {
    // owned: another thread may replace the entry meanwhile
    std::shared_ptr<const Plan> plan;
    const void *input = nullptr;
    void *output = nullptr;
  };
  // No plan if this call is not cached, or needs checks.
  Found find(int kind, nanobind::handle x, nanobind::handle out, nanobind::handle op,
             nanobind::handle root) const;
  void remember(int kind, nanobind::handle x, nanobind::handle out, nanobind::handle op,
                nanobind::handle root, std::shared_ptr<const Plan> plan);

private:
  static constexpr int most_axes = 8; // arrays with more take the general path
  struct Key {
    int kind = -1;
    int ndim = 0;
    const PyObject *descr = nullptr, *op = nullptr, *root = nullptr;
    Py_ssize_t out_rows = -1; // -1: none; its other axes are those of x
    std::array<Py_ssize_t, most_axes> shape; // of x; the first ndim entries are valid
    bool operator==(const Key &other) const {
      return kind == other.kind && ndim == other.ndim && descr == other.descr &&
             op == other.op && root == other.root && out_rows == other.out_rows &&
             std::equal(shape.begin(), shape.begin() + ndim, other.shape.begin());
    }
  };
  struct Entry {
    Key key;
    std::shared_ptr<const Plan> plan;
    nanobind::object descr, op, root; // referenced, so that their addresses are not reused
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
  mutable nanobind::ft_mutex mutex_; // nothing where the interpreter has a lock
  std::vector<Entry> entries_ = std::vector<Entry>(size);
};

} // namespace unisono
