// Messages between hosts: sent in the background of the actions, and received by them.
//
// A message is sent from where the value is stored, as fast as its socket accepts it,
// whenever a thread advances the call. An action that waits for a message receives it frame
// by frame: directly to its destination if it is only copied, otherwise each frame is
// reduced while it is in the cache.

#include <algorithm>
#include <cstring>

#include "engine/collective.hpp"
#include "engine/comm.hpp"
#include "net/io_threads.hpp"
#include "support/failpoint.hpp"

namespace unisono {

void Collective::send_messages() {
  for (std::size_t c = 0; c < cursors_.size(); ++c)
    send_messages(c);
}

void Collective::send_messages(std::size_t c) {
  const Program::Outgoing &outgoing = program_->outgoing[c];
  Cursor &cursor = cursors_[c];
  SendStream &send_stream = comm_.send_stream(outgoing.to);
  // What other threads have received comes first: they wait for the next action.
  while (send_stream.open() && !has_received_shares()) {
    if (cursor.shares > 0) {
      if (!sent_in_shares(c))
        return;
      continue;
    }
    if (!send_stream.idle() && send_stream.flush() == Io::lost) {
      unreachable_ = outgoing.to;
      return;
    }
    if (cursor.piece == plan_->pieces[exposed_])
      return;
    const Program::Message &message = outgoing.messages[cursor.message];
    // A message sent from the input depends on no action, not even of earlier pieces.
    const auto ahead = cursor.piece - piece_;
    if (message.after > 0 &&
        (ahead > 0 || (ahead == 0 && std::size_t(message.after) > action_)))
      return;
    const auto [first, count] = span(message.chunk, cursor.piece);
    const bool coded = message.home == Program::code;
    const std::size_t bytes = coded ? plan_->coding.bytes(count) : count * plan_->itemsize;
    const std::size_t most = coded ? plan_->coding.bytes(plan_->coding.frame) : frame_bytes;
    const std::byte *from =
        coded ? code_address(comm_.rank(), message.index, cursor.piece)
        : message.home == Program::window
            ? window_address(comm_.rank(), message.index, cursor.piece)
            : address({message.home, std::int32_t(comm_.rank()), message.index}, first).at;
    if (traced_ && cursor.since == 0)
      cursor.since = now_ns();
    const bool begins = cursor.piece == 0 && cursor.message == 0 && cursor.at == 0;
    const Note &note = comm_.layout().block(comm_.rank()).notes[seq & 1];
    const Part part{from + cursor.at, bytes - cursor.at,
                    {seq, plan_->fingerprint, std::uint32_t(cursor.piece),
                     std::uint32_t(cursor.message)},
                    begins ? &note : nullptr};
    if (cursor.at == 0 && !coded && sends_in_shares(send_stream, bytes)) {
      if (!send_stream.idle())
        return;
      post_send_shares(c, part);
      continue;
    }
    // A frame may be sent in parts, each by another lane; none crosses its end.
    std::size_t some = std::min(most - cursor.at % most, part.bytes);
    const std::uint64_t ordinal =
        std::uint64_t(cursor.piece) * outgoing.messages.size() + cursor.message;
    if (!send_stream.offer(part.frame_id, part.note, part.from, some, ordinal))
      return;
    failpoint("message.offered");
    ++moved;
    cursor.at += some;
    if (cursor.at == bytes)
      end_message(outgoing, cursor, bytes);
  }
}

void Collective::end_message(const Program::Outgoing &outgoing, Cursor &cursor,
                             std::size_t bytes) {
  if (cursor.since != 0)
    note_message(outgoing, cursor, bytes);
  cursor.since = 0;
  cursor.at = 0;
  if (++cursor.message == outgoing.messages.size()) {
    cursor.message = 0;
    ++cursor.piece;
  }
}

// Whether all messages of `pieces` pieces to a rank have been sent in full, and `messages`
// more.
bool Collective::has_sent(std::size_t rank, std::uint64_t pieces,
                          std::uint64_t messages) const {
  const std::int32_t found =
      program_->outgoing_to.empty() ? -1 : program_->outgoing_to[rank];
  if (found < 0)
    return messages == 0;
  const Cursor &cursor = cursors_[std::size_t(found)];
  const std::uint64_t each = program_->outgoing[std::size_t(found)].messages.size();
  const std::uint64_t offered = std::uint64_t(cursor.piece) * each + cursor.message;
  // In shares a message begins when all before it are sent; the lanes are in use by others.
  const std::uint64_t sent =
      cursor.shares > 0 ? offered : comm_.send_stream(rank).first_unsent(offered);
  return sent >= pieces * each + messages;
}

// Whether messages to or from a rank on another host are outstanding.
bool Collective::has_stream_traffic(std::size_t rank) const {
  return !has_sent(rank, std::uint64_t(plan_->pieces[exposed_]), 0) || expects_data_of(rank);
}

bool Collective::expects_data_of(std::size_t rank) const {
  if (phase_ == Phase::begin)
    return true;
  return !program_->incoming.empty() &&
         received_[rank] < std::uint64_t(program_->incoming[rank]) *
                               std::uint64_t(plan_->pieces[exposed_]);
}

bool Collective::receives(const Program::Action &action) const {
  if (program_->incoming.empty())
    return false;
  for (auto s = action.first_source; s < action.end_source; ++s)
    if (program_->sources[std::size_t(s)].home == Program::stream)
      return true;
  return false;
}

Status Collective::receive(const Program::Action &action) {
  if (plan_->coding.codec != nullptr)
    return receive_coded(action);
  const Movement m = movement(action);
  if (receives_in_shares(m))
    return receive_in_shares(m);
  const ZeroCopy::WriteGuard touch(comm_.zero_copy(), seq, m.delivers);
  if (!touch.allowed()) {
    unreachable_ = first_destination(m);
    return Status::blocked;
  }
  Reception r{at_, arrived_, comm_.zero_copy().scratch(frame_bytes * (m.sources + 1)),
              operands_.data(), nullptr, true};
  do {
    const std::size_t some = std::min(frame_bytes, m.bytes - r.at);
    const Io io = receive_frame(m, r);
    arrived_ = r.arrived;
    if (r.unreachable != no_rank) {
      unreachable_ = r.unreachable;
      return Status::blocked;
    }
    if (io != Io::done)
      return receive_failed(r.awaited, io);
    const std::size_t lost = deliver(m, r.at, r.made, some);
    if (lost != no_rank) {
      unreachable_ = lost;
      return Status::blocked;
    }
    at_ = r.at += some;
    if (m.sources > 1 || m.bytes > frame_bytes)
      send_messages(); // the sockets are ready for more by now
  } while (r.at < m.bytes);
  at_ = 0;
  return unreachable_ == no_rank ? Status::done : Status::blocked;
}

// Receives what has arrived of a frame, from all sources; when it is complete, computes and
// stores its result. A thread that does not advance the call may do it too: of the call it
// changes nothing but these bytes.
Io Collective::receive_frame(const Movement &m, Reception &r) {
  const std::size_t some = std::min(frame_bytes, m.bytes - r.at);
  std::byte *home = m.window != nullptr ? m.window : m.output;
  const auto *source = &program_->sources[std::size_t(m.action.first_source)];
  for (; r.arrived < m.sources; ++r.arrived) {
    const Program::Source &from = source[r.arrived];
    const auto rank = std::size_t(from.rank);
    std::byte *into = r.scratch + (r.arrived + 1) * frame_bytes;
    if (from.home != Program::stream) {
      const PeerAddress near = address(from, m.first) + r.at;
      r.operands[r.arrived] = near.pid == 0 ? near.at : into;
      if (near.pid != 0 && !copy_from_peer(into, near, some)) {
        r.unreachable = rank;
        return Io::lost;
      }
      continue;
    }
    if (m.sources == 1 && home != nullptr)
      into = home + r.at;
    const FrameId frame_id{seq, plan_->fingerprint, std::uint32_t(piece_),
                    std::uint32_t(from.index)};
    ReceiveStream &stream = comm_.receive_stream(rank);
    const Io io = r.lanes == nullptr ? stream.take(frame_id, into, some)
                                     : stream.take_on(r.lanes[r.arrived], frame_id, into, some);
    if (io != Io::done) {
      r.awaited = rank;
      return io;
    }
    if (r.counts)
      count_arrival(rank, r.at + some == m.bytes);
    r.operands[r.arrived] = into;
  }
  r.made = static_cast<std::byte *>(const_cast<void *>(r.operands[0]));
  if (m.sources > 1 && some > 0) { // a barrier has nothing to add
    r.made = home != nullptr ? home + r.at : r.scratch;
    plan_->kernel(r.made, r.operands, m.sources, some / plan_->itemsize,
                  m.action.completes ? plan_->divisor : 1);
  }
  if (m.output != nullptr && r.made != m.output + r.at)
    std::memcpy(m.output + r.at, r.made, some);
  r.arrived = 0;
  return Io::done;
}

void Collective::count_arrival(std::size_t rank, bool ends_message) {
  end_wait(Moment::wait);
  ++moved;
  awaited_sender_ = no_rank;
  received_[rank] += ends_message;
}

// A message of `rank` is not available: not yet, or never.
Status Collective::receive_failed(std::size_t rank, Io why) {
  awaited_sender_ = rank;
  const auto culprit = std::uint32_t(rank), me = std::uint32_t(comm_.rank());
  const auto fails = [&](FailureKind kind) {
    failure = comm_.abort({kind, culprit, me, std::uint32_t(seq)});
    return Status::failed;
  };
  switch (why) {
  case Io::corrupt:
    return fails(FailureKind::corrupted);
  case Io::mismatch: // perhaps of an earlier call, whose messages this rank did not receive
    failure =
        comm_.abort({FailureKind::mismatch, culprit, me,
                     std::uint32_t(std::min(seq, comm_.receive_stream(rank).note().seq))});
    return Status::failed;
  case Io::closed: // it may have closed because of another rank's failure
    if (const Failure theirs = Failure::of(comm_.receive_stream(rank).failure());
        theirs.ends(seq)) {
      failure = comm_.abort(comm_.validated(theirs, rank));
      return Status::failed;
    }
    return fails(FailureKind::closed);
  case Io::truncated: // sent for point-to-point messages only
    return fails(FailureKind::corrupted);
  case Io::lost:
    unreachable_ = rank;
    unreachable_since_ = 0;
    return Status::blocked;
  default:
    begin_wait(rank);
    return Status::blocked;
  }
}

bool Collective::poll_fds(std::vector<pollfd> &into) const {
  if (cursors_.empty() && awaited_sender_ == no_rank)
    return false;
  for (std::size_t c = 0; c < cursors_.size(); ++c) {
    if (cursors_[c].shares == 0)
      comm_.send_stream(program_->outgoing[c].to).poll_fds(into);
    else
      poll_own_shares(c, into);
  }
  if (num_receiving_ > 0 || sends_in_shares()) {
    if (!into.empty()) // otherwise it sleeps on its futex
      into.push_back(threads_->await_end());
    return false;
  }
  if (awaited_sender_ == no_rank)
    return phase_ == Phase::exit && !into.empty();
  comm_.receive_stream(awaited_sender_).poll_fds(into);
  return true;
}

} // namespace unisono
