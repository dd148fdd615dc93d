// What a trace records of a collective. Nothing here changes what the collective does.

#include <algorithm>

#include "engine/collective.hpp"
#include "engine/comm.hpp"

namespace unisono {

Moment &Collective::note(Moment::Kind kind, std::int64_t begun, std::int64_t ended) {
  Moment &moment = comm_.trace().moment();
  moment = {};
  moment.kind = kind;
  moment.begin = begun;
  moment.end = ended;
  moment.seq = std::uint32_t(seq);
  moment.communicator = std::uint32_t(comm_.id());
  moment.action = std::int32_t(action_);
  moment.piece = std::int32_t(piece_);
  moment.exposed = std::uint8_t(exposed_);
  return moment;
}

// A wait is polled many times; it begins when it is first found.
void Collective::begin_wait(std::size_t whom) {
  if (!traced_ || wait_begun_ != 0)
    return;
  last_clock_ = 0;
  wait_begun_ = now_ns();
  awaited_rank_ = whom;
}

void Collective::end_wait(Moment::Kind kind) {
  if (wait_begun_ == 0)
    return;
  last_clock_ = now_ns();
  note(kind, wait_begun_, last_clock_).peer = std::int32_t(awaited_rank_);
  wait_begun_ = 0;
}

void Collective::end_arrival() {
  if (posted_ == 0)
    return;
  // If all ranks were there, no arrival was waited for: awaited_rank_ is no_rank, recorded
  // as -1.
  last_clock_ = now_ns();
  note(Moment::arrival, posted_, last_clock_).peer = std::int32_t(awaited_rank_);
  posted_ = 0;
}

std::size_t Collective::run_traced(const Program::Action &action) {
  // Whatever ended just now has read the clock already.
  const std::int64_t begun = last_clock_ != 0 ? last_clock_ : now_ns();
  const std::size_t lost = run_action(action);
  last_clock_ = now_ns();
  if (lost == no_rank)
    note_action(action, begun, last_clock_);
  return lost;
}

// The action, each value that it read from another rank, and each rank it delivered to.
void Collective::note_action(const Program::Action &action, std::int64_t begun,
                             std::int64_t ended) {
  const std::size_t count = span(action.chunk, piece_).count;
  if (count == 0)
    return;
  const std::uint64_t bytes = count * plan_->itemsize;
  const bool codes = plan_->coding.codec != nullptr;
  const bool alone = action.end_source - action.first_source == 1;
  Moment &whole = note(alone ? Moment::copy : Moment::reduce, begun, ended);
  whole.bytes = bytes;
  whole.chunk = action.chunk;
  whole.index = action.window;
  whole.output = action.output;
  whole.code = action.code;
  const auto part = [&](Moment::Kind kind, std::int32_t peer) -> Moment & {
    Moment &moment = note(kind, begun, ended);
    moment.bytes = bytes;
    moment.chunk = action.chunk;
    moment.peer = peer;
    return moment;
  };
  for (auto s = action.first_source; s < action.end_source; ++s) {
    const Program::Source &source = program_->sources[std::size_t(s)];
    if (std::size_t(source.rank) == comm_.rank())
      continue;
    Moment &moment = part(Moment::pull, source.rank);
    moment.index = source.index;
    moment.home = std::uint8_t(source.home);
    if (codes && is_code(source))
      moment.bytes = plan_->coding.bytes(count);
  }
  for (auto d = action.first_delivery; d < action.end_delivery; ++d)
    part(Moment::deliver, program_->deliveries[std::size_t(d)]);
  if (encoding_ != 0)
    note(Moment::encode, std::max(begun, ended - encoding_), ended).bytes =
        plan_->coding.bytes(count);
  encoding_ = 0;
}

// It may take several attempts; the first is its beginning.
Status Collective::receive_traced(const Program::Action &action) {
  if (receive_begun_ == 0)
    receive_begun_ = now_ns();
  const Status status = receive(action);
  if (status != Status::done)
    return status;
  last_clock_ = now_ns();
  note_action(action, receive_begun_, last_clock_);
  receive_begun_ = 0;
  return status;
}

void Collective::note_message(const Program::Outgoing &outgoing, const Cursor &cursor,
                              std::size_t bytes) {
  if (bytes == 0)
    return;
  const Program::Message &message = outgoing.messages[cursor.message];
  Moment &moment = note(Moment::send, cursor.since, now_ns());
  moment.bytes = bytes;
  moment.chunk = message.chunk;
  moment.peer = message.to;
  moment.piece = std::int32_t(cursor.piece);
  moment.index = std::int32_t(cursor.message);
  moment.home = std::uint8_t(message.home);
}

} // namespace unisono
