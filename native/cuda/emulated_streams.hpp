// Streams, events and graphs of emulated devices. Everything here is used under the lock of
// the state.
//
// A stream is a queue of tasks and a thread that runs them in order. A task begins when the
// one before it has ended, and all that it was told to wait for: the event of another stream,
// or, by the rules of the legacy default stream, the last tasks of other streams. Tasks wait
// only for tasks that were there before them.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/emulated.hpp"
#include "device/cpu_threads.hpp"

namespace unisono::cuda::emulated {

using Lock = std::unique_lock<std::mutex>;
// What a stream does; it is given threads that kernels run on, and has not the lock.
using Work = std::function<Result(device::CpuThreads &)>;

// The end of a task.
struct Completion {
  void wait(Lock &lock) {
    changed.wait(lock, [this] { return done; });
  }
  bool done = false;
  std::int64_t ended_ns = 0;
  std::condition_variable changed;
};
using Done = std::shared_ptr<Completion>;

// A queue of the hardware, which streams share: tasks begin in the order in which they were
// given to it. So one that waits keeps those of other streams behind it from beginning.
struct HardwareQueue {
  std::uint64_t given = 0, begun = 0;
  std::condition_variable changed;
};

// Tasks that run one after the other on a thread, which the first of them starts.
class Queue {
public:
  Queue(State &state, int device, bool blocking,
        std::shared_ptr<HardwareQueue> hardware = nullptr)
      : device(device), blocking(blocking), state_(state), hardware_(std::move(hardware)) {}
  Queue(const Queue &) = delete;

  Done push(std::vector<Done> after, Work work);
  bool idle() const { return last_ == nullptr || last_->done; }
  void wait(Lock &lock) const;
  void close(); // when all tasks have ended, the thread ends
  bool ended() const { return !started_ || ended_; }
  void join(Lock &lock); // after close()
  const Done &last() const { return last_; }

  const int device;
  const bool blocking; // ordered with the legacy default stream

private:
  struct Task {
    std::vector<Done> after;
    Work work;
    Done done;
    std::uint64_t place; // in the hardware's queue
  };
  void run();
  void begin(Lock &lock, const Task &task);
  Result perform(Lock &lock, const Work &work, device::CpuThreads &threads);

  State &state_;
  const std::shared_ptr<HardwareQueue> hardware_; // null: its own
  std::deque<Task> tasks_;
  Done last_;
  bool closing_ = false, started_ = false, ended_ = false;
  std::condition_variable changed_;
  Worker worker_;
};

// A graph: its nodes, each after those it depends on. A lane is a stream of the capture.
struct Node {
  std::vector<std::size_t> after;
  std::size_t lane;
  Work work;
};
struct GraphState {
  std::vector<Node> nodes;
  std::vector<int> lanes; // their devices
};

struct StreamState;

struct Capture {
  const StreamState *origin;
  std::uint64_t id;
  int mode;
  std::thread::id thread;
  bool invalid = false, ended = false;
  GraphState graph;
};

struct StreamState {
  std::shared_ptr<Queue> queue;
  bool legacy = false;
  // While it captures: where to, its lane, and the nodes that its next one comes after.
  std::shared_ptr<Capture> capture = nullptr;
  std::size_t lane = 0;
  std::vector<std::size_t> frontier = {};
};

struct EventState {
  int device;
  bool timed;
  Done recorded = nullptr; // null: never, or in a capture
  std::shared_ptr<Capture> capture = nullptr;
  std::vector<std::size_t> frontier = {};
};

struct ExecState {
  std::shared_ptr<const GraphState> graph;
  std::vector<std::shared_ptr<Queue>> lanes; // of all lanes but the first
  Done last = nullptr;                       // launch
};

class StreamsState {
public:
  explicit StreamsState(State &state);

  // The stream of a handle, or null; no handle is the default stream of the current device.
  std::shared_ptr<StreamState> find(const Entry &at, Stream handle);
  const std::shared_ptr<StreamState> &legacy(int device) {
    return legacy_[std::size_t(device)];
  }

  // Puts work into a stream, or into the graph that the stream captures.
  Result submit(StreamState &stream, Work work, std::vector<Done> after = {},
                Done *done = nullptr);
  // not_ready: work of the stream has not ended.
  Result query(StreamState &stream);
  Result synchronize(Lock &lock, StreamState &stream);
  Result synchronize_device(Lock &lock, int device);
  // The same, for functions during which no thread can launch: nothing is launched meanwhile.
  Result wait_for_kernels(Lock &lock, int device);
  // The same for functions of which CUDA allows it: by the setting, always or never.
  Result wait_where_allowed(Lock &lock, int device);
  // For launches: waits while another thread is in such a function.
  void wait_to_launch(Lock &lock) {
    launchable_.wait(lock, [this] { return waiting_ == 0; });
  }
  // The thread of the queue ends when its tasks have.
  void retire(Lock &lock, std::shared_ptr<Queue> queue);
  // That of the next stream which is made; null: its own.
  std::shared_ptr<HardwareQueue> next_hardware_queue(int device);
  // Everything of a context that is destroyed.
  void destroy_of(Lock &lock, int device);

  // What a thread may not do during a capture, by the mode of the thread and of the capture;
  // the captures that forbid it are lost. Whoever is in relaxed mode may.
  Result refuse_unsafe();
  // What is not allowed in a stream that captures: the capture is lost.
  Result refuse_captured(StreamState &stream, Result why);
  Result capture(StreamState &stream, Work work);
  void end_capture(Capture &capture);

  Table<Stream, StreamState> streams;
  Table<Event, EventState> events;
  Table<Graph, const GraphState> graphs;
  Table<GraphExec, ExecState> execs;
  std::uint64_t captures = 0; // that have begun

private:
  // Blocking streams of the device capture: the legacy default stream cannot be used.
  Result refuse_implicit(const StreamState &stream);
  // The host asks how far a stream is, or waits for it.
  Result refuse_asking(StreamState &stream);
  // The last tasks that have not ended, of those with which a stream is ordered.
  std::vector<Done> pending(const StreamState &stream);

  void join_ended(Lock &lock); // the threads of retired queues, as far as they have ended

  State &state_;
  int waiting_ = 0; // threads in wait_for_kernels
  std::condition_variable launchable_;
  std::vector<std::shared_ptr<StreamState>> legacy_; // by device
  std::vector<std::shared_ptr<Queue>> retired_;
  std::vector<std::vector<std::shared_ptr<HardwareQueue>>> hardware_; // by device
  std::size_t streams_made_ = 0;
};

// `body` with the stream of a handle, in the current context.
template <class Body> Result with_stream(Stream handle, Body body) {
  return with_context([&](Entry &at) -> Result {
    const auto stream = at.state.streams->find(at, handle);
    return stream == nullptr ? Result(invalid_handle) : body(at, *stream);
  });
}

} // namespace unisono::cuda::emulated
