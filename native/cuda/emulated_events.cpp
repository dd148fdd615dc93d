#include "cuda/emulated_streams.hpp"

#include <algorithm>

namespace unisono::cuda::emulated {

namespace {

template <class Body> Result with_event(Event handle, Body body) {
  return with_context([&](Entry &at) -> Result {
    const auto event = at.state.streams->events.find(handle);
    return event == nullptr ? Result(invalid_handle) : body(at, *event);
  });
}

// What only a host asks for cannot be known of an event in a capture.
Result refuse_captured(EventState &event) {
  if (event.capture == nullptr)
    return success;
  event.capture->invalid = true;
  return captured_event;
}

void add_once(std::vector<std::size_t> &into, const std::vector<std::size_t> &nodes) {
  for (const std::size_t node : nodes)
    if (std::find(into.begin(), into.end(), node) == into.end())
      into.push_back(node);
}

// The stream joins the capture in which the event was recorded, or is in it.
Result wait_in_capture(StreamsState &streams, StreamState &stream, const EventState &event) {
  const std::shared_ptr<Capture> &capture = event.capture;
  if (capture->ended)
    return captured_event;
  if (capture->invalid)
    return capture_invalidated;
  if (stream.capture != nullptr && stream.capture != capture) {
    capture->invalid = true;
    return streams.refuse_captured(stream, capture_merge);
  }
  if (stream.legacy) {
    capture->invalid = true;
    return capture_implicit;
  }
  if (stream.capture == nullptr) {
    stream.capture = capture;
    stream.lane = capture->graph.lanes.size();
    capture->graph.lanes.push_back(stream.queue->device);
  }
  add_once(stream.frontier, event.frontier);
  return success;
}

} // namespace

Result cuEventCreate(Event *event, unsigned flags) {
  return with_context([&](Entry &at) -> Result {
    if (event == nullptr || (flags & ~7u) != 0)
      return invalid_value;
    *event = at.state.streams->events.add(std::make_shared<EventState>(
        EventState{at.device, (flags & event_without_timing) == 0}));
    return success;
  });
}

Result cuEventDestroy_v2(Event event) {
  return with_context([&](Entry &at) -> Result {
    const bool found = at.state.streams->events.take(event) != nullptr;
    return found ? success : Result(invalid_handle);
  });
}

Result cuEventRecord(Event handle, Stream stream_handle) {
  return with_event(handle, [&](Entry &at, EventState &event) -> Result {
    const auto stream = at.state.streams->find(at, stream_handle);
    if (stream == nullptr || stream->queue->device != event.device)
      return invalid_handle;
    if (stream->capture != nullptr) {
      if (stream->capture->invalid)
        return capture_invalidated;
      event.capture = stream->capture;
      event.frontier = stream->frontier;
      event.recorded = nullptr;
      return success;
    }
    Done done;
    if (const Result refused = at.state.streams->submit(*stream, nullptr, {}, &done))
      return refused;
    event.recorded = done;
    event.capture = nullptr;
    return success;
  });
}

Result cuStreamWaitEvent(Stream stream_handle, Event handle, unsigned flags) {
  return with_event(handle, [&](Entry &at, EventState &event) -> Result {
    StreamsState &streams = *at.state.streams;
    const auto stream = streams.find(at, stream_handle);
    if (stream == nullptr)
      return invalid_handle;
    if (flags != 0)
      return invalid_value;
    if (event.capture != nullptr)
      return wait_in_capture(streams, *stream, event);
    if (event.recorded == nullptr)
      return success;
    if (stream->capture != nullptr)
      return streams.refuse_captured(*stream, capture_isolation);
    return streams.submit(*stream, nullptr, {event.recorded});
  });
}

Result cuEventQuery(Event handle) {
  return with_event(handle, [](Entry &at, EventState &event) -> Result {
    if (const Result refused = refuse_captured(event))
      return refused;
    if (const Result refused = at.state.streams->refuse_unsafe())
      return refused;
    return event.recorded == nullptr || event.recorded->done ? success : not_ready;
  });
}

Result cuEventSynchronize(Event handle) {
  return with_event(handle, [](Entry &at, EventState &event) -> Result {
    if (const Result refused = refuse_captured(event))
      return refused;
    if (const Result refused = at.state.streams->refuse_unsafe())
      return refused;
    if (const Done recorded = event.recorded) // it may be recorded again meanwhile
      recorded->wait(at.lock);
    return at.state.devices[std::size_t(event.device)].failed;
  });
}

Result cuEventElapsedTime(float *milliseconds, Event begin, Event end) {
  return with_context([&](Entry &at) -> Result {
    const auto from = at.state.streams->events.find(begin);
    const auto to = at.state.streams->events.find(end);
    if (from == nullptr || to == nullptr || !from->timed || !to->timed ||
        from->recorded == nullptr || to->recorded == nullptr)
      return invalid_handle;
    if (!from->recorded->done || !to->recorded->done)
      return not_ready;
    *milliseconds = float(double(to->recorded->ended_ns - from->recorded->ended_ns) / 1e6);
    return success;
  });
}

} // namespace unisono::cuda::emulated
