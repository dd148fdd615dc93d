// The adapter in C++: a `c10d::Backend` around the same Python object as the other one.
//
// Each call takes Python's lock and says what torch wants to `TorchCollectives`. What comes
// back is a `PendingCall`; the work around it has a future that needs no Python to be
// completed. Calls on plain tensors are made here, without Python: collectives by their plans
// (`plans.hpp`), messages (`messages.hpp`), and their work (`begun_work.hpp`).

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "begun_work.hpp"
#include "messages.hpp"
#include "plans.hpp"

namespace unisono {

using c10d::OpType;
using Tensor = at::Tensor;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensors flat(const Lists &lists) {
  Tensors all;
  for (const Tensors &some : lists)
    all.insert(all.end(), some.begin(), some.end());
  return all;
}

// torch 2.11 has no type of its own for it, 2.13 has.
template <class Types> constexpr Types coalesced_reduce_scatter() {
  if constexpr (requires { Types::REDUCE_SCATTER_TENSOR_COALESCED; })
    return Types::REDUCE_SCATTER_TENSOR_COALESCED;
  else
    return Types::REDUCE_SCATTER;
}

class UnisonoBackend : public c10d::Backend {
public:
  UnisonoBackend(py::object calls, py::object planned, int rank, int size,
                 std::chrono::milliseconds timeout)
      : Backend(rank, size), calls_(std::move(calls)), planned_(std::move(planned)),
        options_(c10::make_intrusive<Options>("unisono", timeout)) {}

  const std::string getBackendName() const override { return "unisono"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override { sequence_ = 0; }
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }

  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    tell("set_timeout", timeout);
  }
  void shutdown() override {
    py::gil_scoped_acquire locked;
    (*planned_).attr("leave")(latest_ ? *latest_ : py::handle(Py_None));
  }
  void abort() override { tell("close"); }
  void monitoredBarrier(const c10d::BarrierOptions &opts, bool all) override {
    tell("monitored_barrier", opts.timeout, all);
  }
  void startCoalescing() override {
    together_ = true;
    tell("start_together");
  }
  WorkPtr endCoalescing() override {
    together_ = false;
    return call({OpType::COALESCED, "unisono:coalesced", "end_together"}, {}, {});
  }

  // Of the device only the number is told: -1 is a CPU.
  bool supportsTensorAlloc(c10::DeviceIndex index) override {
    py::gil_scoped_acquire locked;
    return py::cast<bool>((*calls_).attr("tensors").attr("serves_number")(int(index)));
  }
  Tensor allocateTensor(long size, at::TensorOptions options) override {
    py::gil_scoped_acquire locked;
    const auto dtype = c10::typeMetaToScalarType(options.dtype());
    return py::cast<Tensor>(
        (*calls_).attr("tensors").attr("make")(size, dtype, options.device()));
  }
  std::shared_ptr<c10::Allocator> getMemAllocator() override {
    py::gil_scoped_acquire locked;
    const auto words = py::module_::import("unisono.interop.torch.allocation").attr("NO_ALLOCATOR");
    TORCH_CHECK(false, py::cast<std::string>(words));
  }

  WorkPtr allreduce(Tensors &x, const c10d::AllreduceOptions &opts) override {
    if (WorkPtr work = planned_in_place(OpType::ALLREDUCE, all_reduce, x, opts, opts.reduceOp, 0))
      return work;
    return call({OpType::ALLREDUCE, "unisono:all_reduce", "allreduce"}, x, x, x, opts);
  }
  WorkPtr allreduce_sparse(Tensors &x, const c10d::AllreduceOptions &opts) override {
    return allreduce(x, opts);
  }
  WorkPtr allreduce_coalesced(Tensors &x,
                              const c10d::AllreduceCoalescedOptions &opts) override {
    return call({OpType::ALLREDUCE_COALESCED, "unisono:all_reduce", "allreduce"}, x, x, x,
                opts);
  }
  WorkPtr reduce(Tensors &x, const c10d::ReduceOptions &opts) override {
    if (WorkPtr work =
            planned_in_place(OpType::REDUCE, reduce_, x, opts, opts.reduceOp, opts.rootRank))
      return work;
    return call({OpType::REDUCE, "unisono:reduce", "reduce"}, x, x, x, opts);
  }
  WorkPtr broadcast(Tensors &x, const c10d::BroadcastOptions &opts) override {
    if (WorkPtr work = planned_in_place(OpType::BROADCAST, broadcast_, x, opts,
                                        ReductionType::SUM, opts.rootRank))
      return work;
    return call({OpType::BROADCAST, "unisono:broadcast", "broadcast"}, x, x, x, opts);
  }
  WorkPtr allgather(Lists &y, Tensors &x, const c10d::AllgatherOptions &opts) override {
    return call({OpType::ALLGATHER, "unisono:all_gather", "allgather"}, x, flat(y), y, x,
                opts);
  }
  WorkPtr _allgather_base(Tensor &y, Tensor &x, const c10d::AllgatherOptions &opts) override {
    if (begins_plain() && plain_bytes(x, y, size_, 1))
      if (WorkPtr work = planned(OpType::_ALLGATHER_BASE, all_gather, x, y, {y}, opts,
                                 ReductionType::SUM, 0, y.numel()))
        return work;
    return call({OpType::_ALLGATHER_BASE, "unisono:_all_gather_base", "all_gather_single"},
                {x}, {y}, y, x, opts);
  }
  WorkPtr allgather_coalesced(Lists &y, Tensors &x,
                              const c10d::AllgatherOptions &opts) override {
    return call({OpType::ALLGATHER_COALESCED, "unisono:all_gather", "allgather_coalesced"}, x,
                flat(y), y, x, opts);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors &y, Tensors &x,
                                          const c10d::AllgatherOptions &opts) override {
    return call({OpType::ALLGATHER_COALESCED, "unisono:all_gather",
                 "all_gather_single_coalesced"},
                x, y, y, x, opts);
  }
  WorkPtr gather(Lists &y, Tensors &x, const c10d::GatherOptions &opts) override {
    return call({OpType::GATHER, "unisono:gather", "gather"}, x, flat(y), y, x, opts);
  }
  WorkPtr scatter(Tensors &y, Lists &x, const c10d::ScatterOptions &opts) override {
    return call({OpType::SCATTER, "unisono:scatter", "scatter"}, flat(x), y, y, x, opts);
  }
  WorkPtr reduce_scatter(Tensors &y, Lists &x,
                         const c10d::ReduceScatterOptions &opts) override {
    return call({OpType::REDUCE_SCATTER, "unisono:reduce_scatter", "reduce_scatter"}, flat(x),
                y, y, x, opts);
  }
  WorkPtr _reduce_scatter_base(Tensor &y, Tensor &x,
                               const c10d::ReduceScatterOptions &opts) override {
    if (begins_plain() && plain_bytes(x, y, 1, size_))
      if (WorkPtr work = planned(OpType::_REDUCE_SCATTER_BASE, reduce_scatter_, x, y, {y}, opts,
                                 opts.reduceOp, 0, x.numel()))
        return work;
    return call({OpType::_REDUCE_SCATTER_BASE, "unisono:_reduce_scatter_base",
                 "reduce_scatter_single"},
                {x}, {y}, y, x, opts);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors &y, Tensors &x,
                                          const c10d::ReduceScatterOptions &opts) override {
    return call({coalesced_reduce_scatter<OpType>(), "unisono:reduce_scatter",
                 "reduce_scatter_single_coalesced"},
                x, y, y, x, opts);
  }
  WorkPtr alltoall(Tensors &y, Tensors &x, const c10d::AllToAllOptions &opts) override {
    return call({OpType::ALLTOALL, "unisono:all_to_all", "alltoall"}, x, y, y, x, opts);
  }
  WorkPtr alltoall_base(Tensor &y, Tensor &x, std::vector<std::int64_t> &gets,
                        std::vector<std::int64_t> &gives,
                        const c10d::AllToAllOptions &opts) override {
    const bool even = gets.empty() && gives.empty() && x.dim() > 0 && x.size(0) % size_ == 0;
    if (even && begins_plain() && plain_bytes(x, y, 1, 1))
      if (WorkPtr work = planned(OpType::ALLTOALL_BASE, all_to_all, x, y, {y}, opts,
                                 ReductionType::SUM, 0, x.numel()))
        return work;
    return call({OpType::ALLTOALL_BASE, "unisono:all_to_all", "all_to_all_single"}, {x}, {y},
                y, x, gets, gives, opts);
  }
  WorkPtr barrier(const c10d::BarrierOptions &opts) override {
    if (begins_plain())
      if (WorkPtr work = planned(OpType::BARRIER, barrier_, nothing_, nothing_, {}, opts,
                                 ReductionType::SUM, 0, 0))
        return work;
    return call({OpType::BARRIER, "unisono:barrier", "barrier"}, {}, {}, opts);
  }
  WorkPtr send(Tensors &x, int to, int tag) override {
    if (WorkPtr work = planned_message(OpType::SEND, x, to, tag))
      return work;
    return call({OpType::SEND, "unisono:send", "send"}, x, x, x, to, tag);
  }
  WorkPtr recv(Tensors &y, int from, int tag) override {
    if (WorkPtr work = planned_message(OpType::RECV, y, from, tag))
      return work;
    return call({OpType::RECV, "unisono:recv", "recv"}, y, y, y, from, tag);
  }
  WorkPtr recvAnysource(Tensors &y, int tag) override {
    if (WorkPtr work = planned_message(OpType::RECVANYSOURCE, y, -1, tag))
      return work;
    return call({OpType::RECVANYSOURCE, "unisono:recvAnySource", "recv"}, y, y, y,
                std::optional<int>(), tag);
  }

private:
  struct Call {
    OpType type;
    const char *title; // to the profiler
    const char *method;
  };

  // Their names for Python.
  static constexpr const char all_reduce[] = "all_reduce", reduce_[] = "reduce",
                              broadcast_[] = "broadcast", all_gather[] = "all_gather",
                              reduce_scatter_[] = "reduce_scatter",
                              all_to_all[] = "all_to_all", barrier_[] = "barrier";

  // Whether a call is not one of several that are one work, and is not recorded.
  bool begins_plain() const { return !together_ && !is_recorded(); }

  // A call whose tensors are used as they are. Null if Python has to make it.
  template <class Options>
  WorkPtr planned(OpType type, const char *collective, const Tensor &x, const Tensor &y,
                  const Tensors &outputs, const Options &opts, ReductionType op,
                  std::int64_t root, std::int64_t count) {
    const auto limit = limit_of(opts.timeout, options_->timeout);
    if (op >= ReductionType::PREMUL_SUM || !limit)
      return nullptr;
    py::gil_scoped_acquire locked;
    const auto [comm, plan] =
        plans_.find(*planned_, {collective, count, root, x.scalar_type(), op});
    if (!plan)
      return nullptr;
    const auto *input = x.const_data_ptr();
    auto *output = y.mutable_data_ptr();
    const std::int64_t timeout = limit->count() * 1'000'000;
    if (opts.asyncOp) {
      auto native = begun(hooks->submit_planned(comm.ptr(), plan.ptr(), input, output, timeout));
      if (!native)
        return nullptr;
      latest_ = PyReference(native);
      return work_of(type, std::move(native), collective, *limit, x, outputs);
    }
    switch (hooks->run_planned(comm.ptr(), plan.ptr(), input, output, timeout)) {
    case WorkHooks::general: return nullptr;
    case WorkHooks::done: break;
    case WorkHooks::written: new Tensors{x, y}; [[fallthrough]]; // never released
    case WorkHooks::failed:
      (*planned_).attr("raise_failure")(std::chrono::duration<double>(*limit).count());
      [[fallthrough]];
    default: throw py::error_already_set();
    }
    ++sequence_;
    return c10::make_intrusive<UnisonoWork>(rank_, type, outputs);
  }

  // A message of one such tensor.
  WorkPtr planned_message(OpType type, const Tensors &x, int peer, int tag) {
    const auto limit = limit_of(options_->timeout, options_->timeout);
    if (x.size() != 1 || !begins_plain() || !plain_bytes(x[0]) || !limit)
      return nullptr;
    const bool sends = type == OpType::SEND;
    void *data = sends ? const_cast<void *>(x[0].const_data_ptr()) : x[0].mutable_data_ptr();
    py::gil_scoped_acquire locked;
    const auto &kind = messages_.find(*planned_, sends, x[0].scalar_type());
    const Message message{sends, peer, tag, data, x[0].nbytes(), kind.collective, kind.dtype,
                          std::uint64_t(x[0].numel() * kind.times), limit->count() * 1'000'000};
    auto native = begun(hooks->begin_message((*kind.comm).ptr(), &message));
    if (!native)
      return nullptr;
    return work_of(type, std::move(native), sends ? "send" : "recv", *limit, {}, x);
  }

  // What a hook has returned; null if Python has to make the call.
  static py::object begun(PyObject *native) {
    if (native == nullptr && PyErr_Occurred())
      throw py::error_already_set();
    return py::reinterpret_steal<py::object>(native);
  }

  WorkPtr work_of(OpType type, py::object native, const char *name,
                  std::chrono::milliseconds limit, const Tensor &input, const Tensors &outputs) {
    ++sequence_;
    PyReference planned(py::reinterpret_borrow<py::object>(*planned_));
    return c10::make_intrusive<BegunWork>(
        rank_, type, std::move(native),
        BegunWork::Call{std::move(planned), name, limit, input, outputs});
  }

  // The same on the one tensor of a call, in place; null if it is not such a call.
  template <class Options>
  WorkPtr planned_in_place(OpType type, const char *collective, const Tensors &x,
                           const Options &opts, ReductionType op, std::int64_t root) {
    if (x.size() != 1 || !begins_plain() || !plain_bytes(x[0]))
      return nullptr;
    return planned(type, collective, x[0], x[0], x, opts, op, root, x[0].numel());
  }

  template <class... Args> void tell(const char *method, const Args &...args) {
    py::gil_scoped_acquire locked;
    (*calls_).attr(method)(args...);
  }

  template <class... Args>
  WorkPtr call(Call what, const Tensors &inputs, const Tensors &outputs,
               const Args &...args) {
    ++sequence_;
    auto work = c10::make_intrusive<UnisonoWork>(rank_, what.type, what.title, inputs, outputs);
    py::gil_scoped_acquire locked;
    try {
      work->begin((*calls_).attr(what.method)(args...));
    } catch (...) {
      work->stop();
      throw;
    }
    return work;
  }

  PyReference calls_, planned_;
  PyReference latest_; // of the collectives that were begun without Python
  c10::intrusive_ptr<Options> options_;
  std::atomic<std::uint64_t> sequence_ = 0;
  std::atomic<bool> together_ = false;
  PlanTable plans_;
  MessageTable messages_;
  Tensor nothing_ = at::empty({0}, at::kByte);
};

c10::intrusive_ptr<c10d::Backend> make_backend(py::object calls, py::object planned, int rank,
                                               int size, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<UnisonoBackend>(std::move(calls), std::move(planned), rank, size,
                                             timeout);
}

// torch calls every group of a backend that it does not know "custom".
class UnisonoGroup : public c10d::ProcessGroup {
public:
  using ProcessGroup::ProcessGroup;
  const std::string getBackendName() const override { return "unisono"; }
};

c10::intrusive_ptr<c10d::ProcessGroup> make_group(const c10::intrusive_ptr<c10d::Store> &store,
                                                  int rank, int size,
                                                  const c10::intrusive_ptr<c10d::Backend> &b,
                                                  const std::vector<c10::Device> &devices) {
  constexpr auto type = c10d::ProcessGroup::BackendType::CUSTOM;
  auto group = c10::make_intrusive<UnisonoGroup>(store, rank, size);
  for (const c10::Device &device : devices)
    group->setBackend(device.type(), type, b);
  group->setDefaultBackend(type);
  return group;
}

} // namespace unisono

PYBIND11_MODULE(_unisono_torch, m) {
  py::module_::import("torch._C._distributed_c10d");
  const py::object found = py::module_::import("unisono._native").attr("work_hooks")();
  unisono::hooks = static_cast<const unisono::WorkHooks *>(
      PyCapsule_GetPointer(found.ptr(), unisono::hooks_name));
  if (unisono::hooks == nullptr)
    throw py::error_already_set();
  m.def("make_backend", &unisono::make_backend);
  m.def("make_group", &unisono::make_group);
  // Before the interpreter ends; afterwards no thread of ours asks for its lock.
  m.def(
      "end", [] { unisono::CallbackPool::get().end(); }, py::call_guard<py::gil_scoped_release>());
}
