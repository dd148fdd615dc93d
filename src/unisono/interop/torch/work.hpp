// Work in flight as torch's C++ sees it, around a `PendingCall` of Python's.

#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "hooks.hpp"
#include "pool.hpp"

namespace unisono {

using Tensors = std::vector<at::Tensor>;

// Calls `then` on a thread of the pool when all parts of a call have ended, and passes whether
// all ended well. It does not take the GIL later.
class CompletionWatch {
public:
  using Then = std::function<void(bool)>;

  // Of a `PendingCall`.
  static void begin(py::handle pending, Then then) {
    begin(py::tuple(pending.attr("native_parts")()), std::move(then));
  }
  static void begin(const py::tuple &parts, Then then) {
    auto *watch = new CompletionWatch(std::move(then), int(parts.size()) + 1);
    for (py::handle part : parts)
      if (hooks->when_done(part.ptr(), &CompletionWatch::ended, watch) != 0)
        throw py::error_already_set(); // it is never called, then
    watch->release();
  }

private:
  CompletionWatch(Then then, int left) : left_(left), then_(std::move(then)) {}

  static void ended(void *arg, int state) {
    auto *watch = static_cast<CompletionWatch *>(arg);
    if (state != 1)
      watch->failed_ = true;
    watch->release();
  }

  void release() {
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1)
      CallbackPool::get().run(
          [watch = std::shared_ptr<CompletionWatch>(this)] { watch->then_(!watch->failed_); });
  }

  std::atomic<int> left_; // one for each part, and one while they are gone through
  std::atomic<bool> failed_ = false;
  Then then_;
};

// With Python's lock, after all parts of a `PendingCall` have ended: what went wrong. It brings
// results home, if they are not.
inline std::exception_ptr failure_of(py::handle pending) {
  const py::object text = pending.attr("failure")();
  if (text.is_none())
    return nullptr;
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, __LINE__}, text.cast<std::string>()));
}

class UnisonoWork : public c10d::Work {
public:
  UnisonoWork(int rank, c10d::OpType type, const char *title, const Tensors &inputs,
              Tensors outputs)
      : Work(rank, type, title, inputs), outputs_(std::move(outputs)) {}

  // Of a call that has ended well.
  UnisonoWork(int rank, c10d::OpType type, Tensors outputs)
      : Work(rank, type), outputs_(std::move(outputs)), over_(true) {}

  // The call goes on without its handle: its tensors must stay, and its result come home.
  ~UnisonoWork() override {
    if (over_ || queued_ || !pending_ || CallbackPool::get().ended())
      return;
    py::gil_scoped_acquire locked;
    try {
      const py::handle pending = *pending_;
      if (py::bool_(pending.attr("is_completed")()) && plain(pending))
        return;
      auto kept = std::make_shared<PyReference>(std::move(pending_));
      CompletionWatch::begin(pending, [kept](bool) {
        py::gil_scoped_acquire locked_too;
        (**kept).attr("settle")();
      });
    } catch (py::error_already_set &raised) {
      raised.discard_as_unraisable("unisono: work that was dropped");
    }
  }

  // With Python's lock: what the call has returned.
  void begin(py::object pending) {
    queued_ = py::len(pending.attr("native_parts")()) == 0;
    if (const py::object place = pending.attr("stream_place")(); !place.is_none()) {
      const auto [stream, device] = place.cast<std::pair<c10::StreamId, c10::DeviceIndex>>();
      stream_ = c10::Stream::unpack3(stream, device, c10::DeviceType::CUDA);
    }
    pending_ = PyReference(std::move(pending));
    if (queued_)
      end();
    else if (recordFunctionEndCallback_)
      CompletionWatch::begin(*pending_, [self = self()](bool) { self->finish(); });
  }
  // What was profiled has ended.
  void stop() { finish(); }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (over_)
      return true;
    py::gil_scoped_acquire locked;
    try {
      (*pending_).attr("wait")(timeout);
    } catch (py::error_already_set &) {
      if (isCompleted())
        finish();
      throw;
    }
    end();
    return true;
  }

  void synchronize() override { wait(); }
  void blockCurrentStream() override { wait(); }

  bool isCompleted() override { return over_ || ask("is_completed"); }
  bool isSuccess() const override { return over_ || ask("is_success"); }

  std::exception_ptr exception() const override {
    if (over_ || !ask("is_completed"))
      return nullptr;
    py::gil_scoped_acquire locked;
    return failure_of(*pending_);
  }

  int sourceRank() const override {
    if (!pending_)
      return -1;
    py::gil_scoped_acquire locked;
    return (*pending_).attr("source_rank")().cast<int>();
  }

  Tensors result() override { return outputs_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    py::gil_scoped_acquire locked; // also keeps two from making one each
    if (future_)
      return future_;
    std::vector<c10::Device> devices;
    if (stream_)
      devices.push_back(stream_->device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(),
                                                       std::move(devices));
    if (queued_ && stream_) // who waits for the future waits on a stream
      complete(false);
    else if (isCompleted()) // and nobody waits for the future yet
      complete(!over_);
    else
      CompletionWatch::begin(*pending_, [self = self(), asks = !plain(*pending_)](bool well) {
        self->complete(asks || !well);
      });
    return future_;
  }

private:
  c10::intrusive_ptr<UnisonoWork> self() {
    return c10::intrusive_ptr<UnisonoWork>::unsafe_reclaim_from_nonowning(this);
  }

  // Whether nothing is left to do once its parts have ended well.
  static bool plain(py::handle pending) { return pending.attr("plain")().cast<bool>(); }

  bool ask(const char *what) const {
    py::gil_scoped_acquire locked;
    return (*pending_).attr(what)().cast<bool>();
  }

  void end() {
    over_ = !stream_; // another stream may have to wait for it as well
    finish();
  }

  void complete(bool asks) {
    std::exception_ptr error;
    if (asks) {
      py::gil_scoped_acquire locked;
      try {
        error = failure_of(*pending_);
      } catch (py::error_already_set &raised) {
        error = std::make_exception_ptr(std::runtime_error(raised.what()));
      }
    }
    if (error) {
      finish(error);
      future_->setError(error);
    } else {
      end();
      c10::OptionalStreamGuard behind; // what is on the stream
      if (stream_)
        behind.reset_stream(*stream_);
      future_->markCompleted(outputs_);
    }
  }

  Tensors outputs_;
  PyReference pending_;
  std::atomic<bool> over_ = false; // it has ended well
  bool queued_ = false;            // it has ended, or its stream has all of it
  std::optional<c10::Stream> stream_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace unisono
