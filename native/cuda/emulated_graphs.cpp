// Captures of streams, and graphs.

#include <algorithm>
#include <utility>

#include "cuda/emulated_streams.hpp"

namespace unisono::cuda::emulated {

Result StreamsState::refuse_captured(StreamState &stream, Result why) {
  stream.capture->invalid = true;
  return why;
}

namespace {

// Of this thread, by cuThreadExchangeStreamCaptureMode.
int &mode_of_thread() {
  thread_local int mode = capture_global;
  return mode;
}

// Whether a capture forbids this thread what may be unsafe.
bool forbids(const Capture &capture) {
  const int mode = mode_of_thread();
  if (mode == capture_relaxed || capture.mode == capture_relaxed)
    return false;
  const bool own = capture.thread == std::this_thread::get_id();
  return own || (mode == capture_global && capture.mode == capture_global);
}

} // namespace

Result StreamsState::refuse_unsafe() {
  Result refused = success;
  for (const auto &[handle, stream] : streams) {
    if (stream->capture == nullptr || !forbids(*stream->capture))
      continue;
    stream->capture->invalid = true;
    refused = capture_unsupported;
  }
  return refused;
}

Result StreamsState::refuse_implicit(const StreamState &stream) {
  Result refused = success;
  for (const auto &[handle, other] : streams)
    if (stream.legacy && other->capture != nullptr && other->queue->blocking &&
        other->queue->device == stream.queue->device) {
      other->capture->invalid = true;
      refused = capture_implicit;
    }
  return refused;
}

Result StreamsState::capture(StreamState &stream, Work work) {
  Capture &capture = *stream.capture;
  if (capture.invalid)
    return capture_invalidated;
  capture.graph.nodes.push_back({stream.frontier, stream.lane, std::move(work)});
  stream.frontier = {capture.graph.nodes.size() - 1};
  return success;
}

void StreamsState::end_capture(Capture &capture) {
  capture.ended = true;
  std::vector<std::shared_ptr<StreamState>> captured;
  for (const auto &[handle, stream] : streams)
    if (stream->capture.get() == &capture)
      captured.push_back(stream);
  for (const auto &stream : captured) {
    stream->capture = nullptr;
    stream->frontier.clear();
  }
}

namespace {

// Whether every node is before those of the frontier, or among them.
bool joined(const GraphState &graph, const std::vector<std::size_t> &frontier) {
  std::vector<bool> reached(graph.nodes.size());
  for (const std::size_t node : frontier)
    reached[node] = true;
  for (std::size_t i = graph.nodes.size(); i-- > 0;)
    if (reached[i])
      for (const std::size_t before : graph.nodes[i].after)
        reached[before] = true;
  return std::find(reached.begin(), reached.end(), false) == reached.end();
}

Result why_not_ended(const StreamState &stream) {
  const Capture &capture = *stream.capture;
  if (capture.mode != capture_relaxed && capture.thread != std::this_thread::get_id())
    return capture_wrong_thread;
  if (capture.invalid)
    return capture_invalidated;
  return joined(capture.graph, stream.frontier) ? success : Result(capture_unjoined);
}

// The nodes of the first lane run in the stream, those of the others beside it.
Result launch(StreamsState &streams, ExecState &exec, StreamState &stream) {
  const GraphState &graph = *exec.graph;
  std::vector<Done> before, done;
  if (exec.last != nullptr && !exec.last->done) // a graph runs once at a time
    before.push_back(exec.last);
  Done begin;
  if (const Result refused = streams.submit(stream, nullptr, std::move(before), &begin))
    return refused;
  for (const Node &node : graph.nodes) {
    std::vector<Done> after{begin};
    for (const std::size_t other : node.after)
      after.push_back(done[other]);
    Queue &queue = node.lane == 0 ? *stream.queue : *exec.lanes[node.lane - 1];
    done.push_back(queue.push(std::move(after), node.work));
  }
  exec.last = stream.queue->push(std::move(done), nullptr);
  return success;
}

} // namespace

Result cuStreamBeginCapture_v2(Stream handle, int mode) {
  return with_stream(handle, [&](Entry &at, StreamState &stream) -> Result {
    if (mode < 0 || mode > capture_relaxed)
      return invalid_value;
    if (stream.legacy)
      return capture_unsupported;
    if (stream.capture != nullptr)
      return illegal_state;
    stream.capture = std::make_shared<Capture>();
    stream.capture->origin = &stream;
    stream.capture->id = ++at.state.streams->captures;
    stream.capture->mode = mode;
    stream.capture->thread = std::this_thread::get_id();
    stream.capture->graph.lanes = {stream.queue->device};
    stream.lane = 0;
    stream.frontier.clear();
    return success;
  });
}

Result cuStreamEndCapture(Stream handle, Graph *graph) {
  return with_stream(handle, [&](Entry &at, StreamState &stream) -> Result {
    *graph = nullptr;
    const std::shared_ptr<Capture> capture = stream.capture;
    if (capture == nullptr)
      return illegal_state;
    if (capture->origin != &stream)
      return at.state.streams->refuse_captured(stream, capture_unmatched);
    const Result failed = why_not_ended(stream);
    at.state.streams->end_capture(*capture);
    if (failed == success)
      *graph = at.state.streams->graphs.add(
          std::make_shared<const GraphState>(std::move(capture->graph)));
    return failed;
  });
}

Result cuThreadExchangeStreamCaptureMode(int *mode) {
  return with_driver([&](Entry &) -> Result {
    if (mode == nullptr || *mode < capture_global || *mode > capture_relaxed)
      return invalid_value;
    std::swap(*mode, mode_of_thread());
    return success;
  });
}

Result cuStreamIsCapturing(Stream handle, int *status) {
  return with_stream(handle, [&](Entry &at, StreamState &stream) -> Result {
    if (stream.legacy)
      for (const auto &[other, state] : at.state.streams->streams)
        if (state->capture != nullptr && state->queue->blocking &&
            state->queue->device == at.device)
          return capture_implicit;
    *status = stream.capture == nullptr ? 0 : stream.capture->invalid ? 2 : 1;
    return success;
  });
}

Result cuStreamGetCaptureInfo_v2(Stream handle, int *status, std::uint64_t *id, Graph *graph,
                                 const GraphNode **dependencies, std::size_t *count) {
  if (graph != nullptr || dependencies != nullptr || count != nullptr)
    return not_supported;
  if (const Result refused = cuStreamIsCapturing(handle, status))
    return refused;
  return with_stream(handle, [&](Entry &, StreamState &stream) -> Result {
    if (id != nullptr && stream.capture != nullptr)
      *id = stream.capture->id;
    return success;
  });
}

Result cuGraphInstantiateWithFlags(GraphExec *exec, Graph handle, unsigned long long flags) {
  return with_context([&](Entry &at) -> Result {
    const auto graph = at.state.streams->graphs.find(handle);
    if (graph == nullptr || flags != 0)
      return invalid_value;
    if (const Result refused = at.state.streams->refuse_unsafe())
      return refused;
    auto made = std::make_shared<ExecState>(ExecState{graph, {}});
    for (std::size_t lane = 1; lane < graph->lanes.size(); ++lane)
      made->lanes.push_back(std::make_shared<Queue>(at.state, graph->lanes[lane], false));
    *exec = at.state.streams->execs.add(std::move(made));
    return success;
  });
}

Result cuGraphLaunch(GraphExec handle, Stream stream_handle) {
  return with_stream(stream_handle, [&](Entry &at, StreamState &stream) -> Result {
    const auto exec = at.state.streams->execs.find(handle);
    if (exec == nullptr)
      return invalid_value;
    if (stream.capture != nullptr) // graphs in graphs are not emulated
      return not_supported;
    at.state.streams->wait_to_launch(at.lock);
    return launch(*at.state.streams, *exec, stream);
  });
}

Result cuGraphExecDestroy(GraphExec handle) {
  return with_context([&](Entry &at) -> Result {
    const auto exec = at.state.streams->execs.take(handle);
    if (exec == nullptr)
      return invalid_value;
    for (auto &lane : exec->lanes)
      at.state.streams->retire(at.lock, std::move(lane));
    return success;
  });
}

Result cuGraphDestroy(Graph handle) {
  return with_driver([&](Entry &at) -> Result {
    const bool found = at.state.streams->graphs.take(handle) != nullptr;
    return found ? success : Result(invalid_value);
  });
}

} // namespace unisono::cuda::emulated
