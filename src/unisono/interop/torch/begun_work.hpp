// Work in flight that was begun without Python. It asks the engine how it stands; Python is
// asked for the words where it has failed.

#pragma once

#include <memory>
#include <utility>

#include "hooks.hpp"
#include "work.hpp"

namespace unisono {

class BegunWork : public c10d::Work {
public:
  // What is told to Python, and which tensors are in use until it has ended.
  struct Call {
    PyReference planned; // the `PlannedCalls` of the group
    const char *name;
    std::chrono::milliseconds limit;
    at::Tensor input;
    Tensors outputs;
  };

  // With Python's lock. `native` is the engine's handle.
  BegunWork(int rank, c10d::OpType type, py::object native, Call call)
      : Work(rank, type), native_(std::move(native)), call_(std::move(call)) {}

  ~BegunWork() override {
    if (state() != WorkHooks::succeeded)
      keep_tensors();
  }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (isSuccess())
      return end();
    py::gil_scoped_acquire locked;
    if (timeout.count() <= 0) {
      const int how = hooks->wait((*native_).ptr());
      if (how < 0)
        throw py::error_already_set();
      if (how == WorkHooks::succeeded)
        return end();
    }
    try {
      pending().attr("wait")(timeout);
    } catch (py::error_already_set &) {
      if (isCompleted())
        finish();
      throw;
    }
    return end();
  }
  void synchronize() override { wait(); }
  void blockCurrentStream() override { wait(); }

  bool isCompleted() override { return state() != WorkHooks::pending; }
  bool isSuccess() const override { return state() == WorkHooks::succeeded; }

  std::exception_ptr exception() const override {
    if (state() != WorkHooks::broken)
      return nullptr;
    py::gil_scoped_acquire locked;
    return failure_of(pending());
  }

  int sourceRank() const override {
    py::gil_scoped_acquire locked;
    return pending().attr("source_rank")().cast<int>();
  }

  Tensors result() override { return call_.outputs; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    py::gil_scoped_acquire locked; // also keeps two from making one each
    if (future_)
      return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    if (isCompleted()) { // and nobody waits for the future yet
      complete();
    } else {
      auto self = c10::intrusive_ptr<BegunWork>::unsafe_reclaim_from_nonowning(this);
      CompletionWatch::begin(py::make_tuple(*native_), [self](bool) { self->complete(); });
    }
    return future_;
  }

private:
  int state() const { return hooks->state((*native_).ptr()); }

  // It has ended well.
  bool end() {
    if (!over_.exchange(true)) {
      call_.input.reset();
      finish();
    }
    return true;
  }

  // With Python's lock: the same work as Python has it, made when it is first needed.
  py::handle pending() const {
    if (!pending_) {
      PyReference made((*call_.planned)
                           .attr("pending")(*native_, call_.name,
                                            std::chrono::duration<double>(call_.limit).count(),
                                            call_.outputs));
      if (!pending_) // no other thread was faster
        pending_ = std::move(made);
    }
    return *pending_;
  }

  void complete() {
    if (isSuccess()) {
      end();
      future_->markCompleted(call_.outputs);
      return;
    }
    std::exception_ptr error;
    {
      py::gil_scoped_acquire locked;
      try {
        error = failure_of(pending());
      } catch (py::error_already_set &raised) {
        error = std::make_exception_ptr(std::runtime_error(raised.what()));
      }
    }
    finish(error);
    future_->setError(error);
  }

  // The call goes on without its handle, or others may still write to its tensors.
  void keep_tensors() {
    struct Kept {
      PyReference native;
      at::Tensor input;
      Tensors outputs;
    };
    auto *kept = new Kept{std::move(native_), std::move(call_.input), std::move(call_.outputs)};
    if (CallbackPool::get().ended())
      return; // for good: nobody could release them
    const auto release = [kept] {
      py::gil_scoped_acquire locked;
      if (!hooks->is_written((*kept->native).ptr()))
        delete kept;
    };
    py::gil_scoped_acquire locked;
    try {
      CompletionWatch::begin(py::make_tuple(*kept->native), [release](bool) { release(); });
    } catch (py::error_already_set &raised) {
      raised.discard_as_unraisable("unisono: work that was dropped");
    }
  }

  PyReference native_;
  Call call_;
  mutable PyReference pending_;
  std::atomic<bool> over_ = false; // it has ended well
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace unisono
