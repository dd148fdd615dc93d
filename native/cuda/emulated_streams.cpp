#include "cuda/emulated_streams.hpp"

#include <algorithm>

#include "support/clock.hpp"

namespace unisono::cuda::emulated {

Done Queue::push(std::vector<Done> after, Work work) {
  if (!started_)
    worker_.start("emulated-stream", [this] { run(); });
  started_ = true;
  auto done = std::make_shared<Completion>();
  tasks_.push_back(
      {std::move(after), std::move(work), done, hardware_ ? hardware_->given++ : 0});
  last_ = done;
  changed_.notify_one();
  return done;
}

void Queue::run() {
  device::CpuThreads threads;
  Lock lock(state_.mutex);
  for (;;) {
    changed_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
    if (tasks_.empty())
      break;
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    begin(lock, task);
    const Result result = perform(lock, task.work, threads);
    Result &failed = state_.devices[std::size_t(device)].failed;
    if (failed == success)
      failed = result;
    task.done->done = true;
    task.done->ended_ns = now_ns();
    task.done->changed.notify_all();
  }
  ended_ = true;
  changed_.notify_all();
}

void Queue::begin(Lock &lock, const Task &task) {
  for (const Done &before : task.after)
    before->wait(lock);
  if (!hardware_)
    return;
  hardware_->changed.wait(lock, [&] { return hardware_->begun == task.place; });
  ++hardware_->begun;
  hardware_->changed.notify_all();
}

// After a failure nothing more is done on the device.
Result Queue::perform(Lock &lock, const Work &work, device::CpuThreads &threads) {
  if (!work || state_.devices[std::size_t(device)].failed != success)
    return success;
  lock.unlock();
  Result result;
  try {
    result = work(threads);
  } catch (const std::system_error &) { // no more threads
    result = launch_failed;
  } catch (const std::bad_alloc &) {
    result = launch_failed;
  }
  lock.lock();
  return result;
}

void Queue::wait(Lock &lock) const {
  if (const Done last = last_)
    last->wait(lock);
}

void Queue::close() {
  closing_ = true;
  changed_.notify_all();
}

void Queue::join(Lock &lock) {
  changed_.wait(lock, [this] { return ended(); });
  worker_.join(); // it needs the lock no more
}

StreamsState::StreamsState(State &state) : state_(state) {
  for (int device = 0; device < state.settings.devices; ++device)
    legacy_.push_back(std::make_shared<StreamState>(
        StreamState{std::make_shared<Queue>(state, device, true), true}));
}

std::shared_ptr<HardwareQueue> StreamsState::next_hardware_queue(int device) {
  const auto count = std::size_t(state_.settings.queues);
  if (count == 0)
    return nullptr;
  hardware_.resize(std::size_t(state_.settings.devices));
  auto &all = hardware_[std::size_t(device)];
  while (all.size() < count)
    all.push_back(std::make_shared<HardwareQueue>());
  return all[streams_made_++ % count];
}

std::shared_ptr<StreamState> StreamsState::find(const Entry &at, Stream handle) {
  const auto number = std::uintptr_t(handle);
  return number <= 1 ? legacy(at.device) : streams.find(handle);
}

std::vector<Done> StreamsState::pending(const StreamState &stream) {
  const Queue &own = *stream.queue;
  std::vector<Done> found;
  const auto add = [&](const Queue &queue) {
    if (&queue != &own && queue.device == own.device && queue.blocking && !queue.idle())
      found.push_back(queue.last());
  };
  if (!own.blocking)
    return found;
  if (!stream.legacy) {
    add(*legacy(own.device)->queue);
    return found;
  }
  for (const auto &[handle, other] : streams)
    add(*other->queue);
  for (const auto &queue : retired_)
    add(*queue);
  return found;
}

Result StreamsState::submit(StreamState &stream, Work work, std::vector<Done> after,
                            Done *done) {
  if (stream.capture != nullptr)
    return capture(stream, std::move(work));
  if (const Result refused = refuse_implicit(stream))
    return refused;
  for (Done &last : pending(stream))
    after.push_back(std::move(last));
  const Done made = stream.queue->push(std::move(after), std::move(work));
  if (done != nullptr)
    *done = made;
  return success;
}

Result StreamsState::refuse_asking(StreamState &stream) {
  if (stream.capture != nullptr)
    return refuse_captured(stream, capture_unsupported);
  const Result refused = refuse_implicit(stream);
  return refused != success ? refused : refuse_unsafe();
}

Result StreamsState::query(StreamState &stream) {
  if (const Result refused = refuse_asking(stream))
    return refused;
  const bool others = stream.legacy && !pending(stream).empty();
  return others || !stream.queue->idle() ? not_ready : success;
}

Result StreamsState::synchronize(Lock &lock, StreamState &stream) {
  if (const Result refused = refuse_asking(stream))
    return refused;
  const std::shared_ptr<Queue> queue = stream.queue; // it may be destroyed meanwhile
  const auto others = stream.legacy ? pending(stream) : std::vector<Done>();
  queue->wait(lock);
  for (const Done &last : others)
    last->wait(lock);
  return state_.devices[std::size_t(queue->device)].failed;
}

Result StreamsState::synchronize_device(Lock &lock, int device) {
  std::vector<Done> all;
  const auto add = [&](const Queue &queue) {
    if (queue.device == device && !queue.idle())
      all.push_back(queue.last());
  };
  add(*legacy(device)->queue);
  for (const auto &[handle, stream] : streams)
    add(*stream->queue);
  for (const auto &[handle, exec] : execs)
    for (const auto &lane : exec->lanes)
      add(*lane);
  for (const auto &queue : retired_)
    add(*queue);
  for (const Done &last : all)
    last->wait(lock);
  join_ended(lock);
  return state_.devices[std::size_t(device)].failed;
}

Result StreamsState::wait_for_kernels(Lock &lock, int device) {
  ++waiting_;
  const Result result = synchronize_device(lock, device);
  if (--waiting_ == 0)
    launchable_.notify_all();
  return result;
}

Result StreamsState::wait_where_allowed(Lock &lock, int device) {
  return state_.settings.waits ? wait_for_kernels(lock, device) : success;
}

void StreamsState::retire(Lock &lock, std::shared_ptr<Queue> queue) {
  queue->close();
  if (queue->idle())
    queue->join(lock);
  else
    retired_.push_back(std::move(queue));
  join_ended(lock);
}

void StreamsState::join_ended(Lock &lock) {
  for (auto i = retired_.begin(); i != retired_.end();)
    if ((*i)->ended()) {
      (*i)->join(lock); // does not wait: the lock is held
      i = retired_.erase(i);
    } else {
      ++i;
    }
}

void StreamsState::destroy_of(Lock &lock, int device) {
  (void)synchronize_device(lock, device);
  std::vector<std::shared_ptr<Queue>> closed;
  const auto close = [&](std::shared_ptr<Queue> queue) {
    if (queue->device == device)
      closed.push_back(std::move(queue));
  };
  for (const auto &[handle, stream] : streams)
    close(stream->queue);
  close(legacy(device)->queue);
  for (const auto &[handle, exec] : execs)
    for (const auto &lane : exec->lanes)
      close(lane);
  execs.erase_if([&](const ExecState &e) { return e.graph->lanes[0] == device; });
  streams.erase_if([&](const StreamState &s) { return s.queue->device == device; });
  events.erase_if([&](const EventState &e) { return e.device == device; });
  state_.functions.erase_if([&](const FunctionState &f) { return f.module->device == device; });
  state_.modules.erase_if([&](const ModuleState &m) { return m.device == device; });
  legacy_[std::size_t(device)] = std::make_shared<StreamState>(
      StreamState{std::make_shared<Queue>(state_, device, true), true});
  for (auto &queue : closed)
    retire(lock, std::move(queue));
}

Result cuStreamCreate(Stream *stream, unsigned flags) {
  return with_context([&](Entry &at) -> Result {
    if (stream == nullptr || (flags & ~stream_non_blocking) != 0)
      return invalid_value;
    const bool blocking = flags == 0;
    auto hardware = at.state.streams->next_hardware_queue(at.device);
    *stream = at.state.streams->streams.add(std::make_shared<StreamState>(StreamState{
        std::make_shared<Queue>(at.state, at.device, blocking, std::move(hardware))}));
    return success;
  });
}

// Streams of another priority than the default share no queue with those that have it.
Result cuStreamCreateWithPriority(Stream *stream, unsigned flags, int priority) {
  if (priority == 0)
    return cuStreamCreate(stream, flags);
  return with_context([&](Entry &at) -> Result {
    if (stream == nullptr || (flags & ~stream_non_blocking) != 0)
      return invalid_value;
    *stream = at.state.streams->streams.add(std::make_shared<StreamState>(
        StreamState{std::make_shared<Queue>(at.state, at.device, flags == 0)}));
    return success;
  });
}

Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  return with_context([&](Entry &) -> Result {
    if (least != nullptr)
      *least = 0;
    if (greatest != nullptr)
      *greatest = -5;
    return success;
  });
}

// Returns at once: what the stream was given is still done.
Result cuStreamDestroy_v2(Stream handle) {
  return with_context([&](Entry &at) -> Result {
    StreamsState &streams = *at.state.streams;
    const auto stream = streams.streams.take(handle);
    if (stream == nullptr)
      return invalid_handle;
    if (const auto capture = stream->capture) {
      capture->invalid = true;
      if (capture->origin == stream.get()) // nobody can end it any more
        streams.end_capture(*capture);
    }
    streams.retire(at.lock, stream->queue);
    return success;
  });
}

Result cuStreamSynchronize(Stream handle) {
  return with_stream(handle, [](Entry &at, StreamState &stream) -> Result {
    return at.state.streams->synchronize(at.lock, stream);
  });
}

Result cuStreamQuery(Stream handle) {
  return with_stream(handle, [](Entry &at, StreamState &stream) -> Result {
    return at.state.streams->query(stream);
  });
}

} // namespace unisono::cuda::emulated
