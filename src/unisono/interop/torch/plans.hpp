// Collectives on tensors as they are: what one needs is asked of Python once, and from then on
// it is made without Python code.

#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "pool.hpp"

namespace unisono {

using ReductionType = c10d::ReduceOp::RedOpType;

// What the plan of a call depends on.
struct PlanKey {
  const char *collective; // one of the names in backend.cpp, told apart by their addresses
  std::int64_t count;
  std::int64_t root;
  at::ScalarType dtype;
  ReductionType op;

  bool operator==(const PlanKey &) const = default;
  struct Hash {
    std::size_t operator()(const PlanKey &key) const {
      std::size_t mixed = reinterpret_cast<std::uintptr_t>(key.collective);
      for (const std::int64_t part :
           {key.count, key.root, std::int64_t(key.dtype), std::int64_t(key.op)})
        mixed = mixed * 1000003 + std::size_t(part);
      return mixed ^ mixed >> 17;
    }
  };
};

// The plans of a group's calls. With Python's lock.
class PlanTable {
public:
  struct Found {
    py::object comm, plan; // none: Python makes this call
  };

  Found find(py::handle planned, const PlanKey &key) {
    auto at = table_.find(key);
    if (at == table_.end()) {
      const py::object made = planned.attr("plan_for")(key.collective, key.dtype, key.count,
                                                       py::cast(key.op), key.root);
      if (table_.size() >= most)
        table_.clear();
      Entry entry;
      if (!made.is_none()) {
        auto [comm, plan] = made.cast<std::pair<py::object, py::object>>();
        entry = {PyReference(std::move(comm)), PyReference(std::move(plan))};
      }
      at = table_.insert_or_assign(key, std::move(entry)).first;
    }
    return {py::reinterpret_borrow<py::object>(*at->second.comm),
            py::reinterpret_borrow<py::object>(*at->second.plan)};
  }

private:
  struct Entry {
    PyReference comm, plan;
  };
  static constexpr std::size_t most = 4096;
  std::unordered_map<PlanKey, Entry, PlanKey::Hash> table_;
};

// Whether a tensor's bytes are its values, one after the other, on the CPU.
inline bool plain_bytes(const at::Tensor &x) {
  return x.is_cpu() && x.layout() == at::kStrided && x.is_contiguous() && !x.is_conj() &&
         !x.is_neg() && !x._is_zerotensor();
}

// The same for two that are of one type, of which y has more/fewer of x, and do not overlap.
inline bool plain_bytes(const at::Tensor &x, const at::Tensor &y, std::int64_t more,
                        std::int64_t fewer) {
  if (!plain_bytes(x) || !plain_bytes(y) || x.scalar_type() != y.scalar_type() ||
      y.numel() * fewer != x.numel() * more)
    return false;
  const auto *a = static_cast<const char *>(x.const_data_ptr());
  const auto *b = static_cast<const char *>(y.const_data_ptr());
  return a >= b + y.nbytes() || b >= a + x.nbytes();
}

// Whether somebody, such as torch's profiler, is told of calls.
inline bool is_recorded() { return at::isRecordFunctionEnabled() && at::hasCallbacks(); }

// The deadline of a call, or of its group; none if that is not a time.
inline std::optional<std::chrono::milliseconds> limit_of(std::chrono::milliseconds own,
                                                         std::chrono::milliseconds group) {
  const auto limit = own.count() > 0 ? own : group;
  if (limit.count() <= 0)
    return std::nullopt;
  return std::min(limit, std::chrono::milliseconds(1'000'000'000'000)); // 30 years
}

} // namespace unisono
