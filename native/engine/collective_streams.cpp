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
#include "support/failpoint.hpp"

namespace unisono {

void Collective::send_messages() {
  for (std::size_t c = 0; c < cursors_.size(); ++c)
    send_messages(program_->outgoing[c], cursors_[c]);
}

void Collective::send_messages(const Program::Outgoing &outgoing, Cursor &cursor) {
  SendStream &send_stream = comm_.send_stream(outgoing.to);
  while (send_stream.open()) {
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
    const std::size_t some = std::min(most, bytes - cursor.at);
    const std::byte *from =
        coded ? code_address(comm_.rank(), message.index, cursor.piece)
        : message.home == Program::window
            ? window_address(comm_.rank(), message.index, cursor.piece)
            : address({message.home, std::int32_t(comm_.rank()), message.index}, first).at;
    if (traced_ && cursor.since == 0)
      cursor.since = now_ns();
    const bool begins = cursor.piece == 0 && cursor.message == 0 && cursor.at == 0;
    const Note &note = comm_.layout().block(comm_.rank()).notes[seq & 1];
    const FrameId frame_id{seq, plan_->fingerprint, std::uint32_t(cursor.piece),
                    std::uint32_t(cursor.message)};
    const std::uint64_t ordinal =
        std::uint64_t(cursor.piece) * outgoing.messages.size() + cursor.message;
    if (!send_stream.offer(frame_id, begins ? &note : nullptr, from + cursor.at, some,
                           ordinal))
      return;
    failpoint("message.offered");
    ++moved;
    cursor.at += some;
    if (cursor.at < bytes)
      continue;
    if (cursor.since != 0)
      note_message(outgoing, cursor, bytes);
    cursor.since = 0;
    cursor.at = 0;
    if (++cursor.message == outgoing.messages.size()) {
      cursor.message = 0;
      ++cursor.piece;
    }
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
  return comm_.send_stream(rank).first_unsent(offered) >= pieces * each + messages;
}

// Whether messages to or from a rank on another host are outstanding.
bool Collective::has_stream_traffic(std::size_t rank) const {
  const auto pieces = std::uint64_t(plan_->pieces[exposed_]);
  const std::uint64_t due =
      program_->incoming.empty() ? 0 : std::uint64_t(program_->incoming[rank]) * pieces;
  return !has_sent(rank, pieces, 0) || (due > 0 && received_[rank] < due);
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
  const ZeroCopy::WriteGuard touch(comm_.zero_copy(), m.delivers);
  if (!touch.allowed()) {
    unreachable_ = first_destination(m);
    return Status::blocked;
  }
  std::byte *home = m.window != nullptr ? m.window : m.output;
  std::byte *scratch = comm_.zero_copy().scratch(frame_bytes * (m.sources + 1));
  const auto *source = &program_->sources[std::size_t(action.first_source)];
  do {
    const std::size_t some = std::min(frame_bytes, m.bytes - at_);
    for (; arrived_ < m.sources; ++arrived_) {
      const Program::Source &from = source[arrived_];
      const auto rank = std::size_t(from.rank);
      std::byte *into = scratch + (arrived_ + 1) * frame_bytes;
      if (from.home != Program::stream) {
        const PeerAddress near = address(from, m.first) + at_;
        operands_[arrived_] = near.pid == 0 ? near.at : into;
        if (near.pid != 0 && !copy_from_peer(into, near, some)) {
          unreachable_ = rank;
          return Status::blocked;
        }
        continue;
      }
      if (m.sources == 1 && home != nullptr)
        into = home + at_;
      const FrameId frame_id{seq, plan_->fingerprint, std::uint32_t(piece_),
                      std::uint32_t(from.index)};
      const Io io = comm_.receive_stream(rank).take(frame_id, into, some);
      if (io != Io::done)
        return receive_failed(rank, io);
      end_wait(Moment::wait);
      ++moved;
      awaited_sender_ = no_rank;
      operands_[arrived_] = into;
      received_[rank] += at_ + some == m.bytes;
    }
    auto *made = static_cast<std::byte *>(const_cast<void *>(operands_[0]));
    if (m.sources > 1) {
      made = home != nullptr ? home + at_ : scratch;
      plan_->kernel(made, operands_.data(), m.sources, some / plan_->itemsize,
                    action.completes ? plan_->divisor : 1);
    }
    if (m.output != nullptr && made != m.output + at_)
      std::memcpy(m.output + at_, made, some);
    const std::size_t lost = deliver(m, at_, made, some);
    if (lost != no_rank) {
      unreachable_ = lost;
      return Status::blocked;
    }
    at_ += some;
    arrived_ = 0;
    if (m.sources > 1 || m.bytes > frame_bytes)
      send_messages(); // the sockets are ready for more by now
  } while (at_ < m.bytes);
  at_ = 0;
  return unreachable_ == no_rank ? Status::done : Status::blocked;
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
    if (const std::uint64_t word = comm_.receive_stream(rank).failure(); word != 0) {
      failure = comm_.abort(comm_.validated(Failure::of(word), rank));
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
  for (std::size_t c = 0; c < cursors_.size(); ++c)
    comm_.send_stream(program_->outgoing[c].to).poll_fds(into);
  if (awaited_sender_ == no_rank)
    return phase_ == Phase::exit && !into.empty();
  comm_.receive_stream(awaited_sender_).poll_fds(into);
  return true;
}

} // namespace unisono
