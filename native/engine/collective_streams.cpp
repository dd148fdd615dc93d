// What goes between hosts: messages that leave beside the actions, and those that arrive.
//
// Messages leave from where they lie, as fast as their sockets take them, whenever somebody
// advances the call. An action that waits for one takes it frame by frame: straight to where
// it is wanted if it is only copied, and otherwise it is added up while it is in the cache.

#include <algorithm>
#include <cstring>

#include "engine/collective.hpp"
#include "engine/comm.hpp"
#include "support/failpoint.hpp"

namespace unisono {

void Collective::depart() {
  for (std::size_t c = 0; c < cursors_.size(); ++c)
    depart(program_->courses[c], cursors_[c]);
}

void Collective::depart(const Program::Course &course, Cursor &cursor) {
  Outlet &outlet = comm_.outlet(course.to);
  while (outlet.open()) {
    if (!outlet.idle() && outlet.pump() == Io::lost) {
      lost_ = course.to;
      return;
    }
    if (cursor.piece == plan_->pieces[lent_])
      return;
    const Program::Message &message = course.messages[cursor.message];
    // What leaves from the input needs no action, not even those of earlier pieces.
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
        coded ? code_place(comm_.rank(), message.index, cursor.piece)
        : message.home == Program::window
            ? place(comm_.rank(), message.index, cursor.piece)
            : address({message.home, std::int32_t(comm_.rank()), message.index}, first).at;
    if (traced_ && cursor.since == 0)
      cursor.since = now_ns();
    const bool begins = cursor.piece == 0 && cursor.message == 0 && cursor.at == 0;
    const Note &note = comm_.layout().block(comm_.rank()).notes[seq & 1];
    const Mark mark{seq, plan_->fingerprint, std::uint32_t(cursor.piece),
                    std::uint32_t(cursor.message)};
    const std::uint64_t ordinal =
        std::uint64_t(cursor.piece) * course.messages.size() + cursor.message;
    if (!outlet.offer(mark, begins ? &note : nullptr, from + cursor.at, some, ordinal))
      return;
    failpoint("message.offered");
    ++moved;
    cursor.at += some;
    if (cursor.at < bytes)
      continue;
    if (cursor.since != 0)
      note_message(course, cursor, bytes);
    cursor.since = 0;
    cursor.at = 0;
    if (++cursor.message == course.messages.size()) {
      cursor.message = 0;
      ++cursor.piece;
    }
  }
}

// Whether all messages to a rank of so many pieces have left entirely, and so many more.
bool Collective::has_left(std::size_t rank, std::uint64_t pieces,
                          std::uint64_t messages) const {
  const std::int32_t found = program_->course_to.empty() ? -1 : program_->course_to[rank];
  if (found < 0)
    return messages == 0;
  const Cursor &cursor = cursors_[std::size_t(found)];
  const std::uint64_t each = program_->courses[std::size_t(found)].messages.size();
  const std::uint64_t offered = std::uint64_t(cursor.piece) * each + cursor.message;
  return comm_.outlet(rank).left(offered) >= pieces * each + messages;
}

// Whether something is still to come from a rank on another host, or to leave for it.
bool Collective::crosses(std::size_t rank) const {
  const auto pieces = std::uint64_t(plan_->pieces[lent_]);
  const std::uint64_t due =
      program_->incoming.empty() ? 0 : std::uint64_t(program_->incoming[rank]) * pieces;
  return !has_left(rank, pieces, 0) || (due > 0 && came_[rank] < due);
}

bool Collective::arrives(const Program::Action &action) const {
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
  const Lending::Touch touch(comm_.lending(), m.delivers);
  if (!touch.allowed()) {
    lost_ = first_served(m);
    return Status::blocked;
  }
  std::byte *home = m.window != nullptr ? m.window : m.output;
  std::byte *scrap = comm_.lending().scrap(frame_bytes * (m.sources + 1));
  const auto *source = &program_->sources[std::size_t(action.first_source)];
  do {
    const std::size_t some = std::min(frame_bytes, m.bytes - at_);
    for (; arrived_ < m.sources; ++arrived_) {
      const Program::Source &from = source[arrived_];
      const auto rank = std::size_t(from.rank);
      std::byte *into = scrap + (arrived_ + 1) * frame_bytes;
      if (from.home != Program::stream) {
        const Reach near = address(from, m.first) + at_;
        operands_[arrived_] = near.pid == 0 ? near.at : into;
        if (near.pid != 0 && !fetch(into, near, some)) {
          lost_ = rank;
          return Status::blocked;
        }
        continue;
      }
      if (m.sources == 1 && home != nullptr)
        into = home + at_;
      const Mark mark{seq, plan_->fingerprint, std::uint32_t(piece_),
                      std::uint32_t(from.index)};
      const Io io = comm_.inlet(rank).take(mark, into, some);
      if (io != Io::done)
        return stopped(rank, io);
      end_wait(Moment::wait);
      ++moved;
      awaited_ = nobody;
      operands_[arrived_] = into;
      came_[rank] += at_ + some == m.bytes;
    }
    auto *made = static_cast<std::byte *>(const_cast<void *>(operands_[0]));
    if (m.sources > 1) {
      made = home != nullptr ? home + at_ : scrap;
      plan_->kernel(made, operands_.data(), m.sources, some / plan_->itemsize,
                    action.completes ? plan_->divisor : 1);
    }
    if (m.output != nullptr && made != m.output + at_)
      std::memcpy(m.output + at_, made, some);
    const std::size_t lost = deliver(m, at_, made, some);
    if (lost != nobody) {
      lost_ = lost;
      return Status::blocked;
    }
    at_ += some;
    arrived_ = 0;
    if (m.sources > 1 || m.bytes > frame_bytes)
      depart(); // the sockets are ready for more by now
  } while (at_ < m.bytes);
  at_ = 0;
  return lost_ == nobody ? Status::done : Status::blocked;
}

// A message of `rank` cannot be had: not yet, or not at all.
Status Collective::stopped(std::size_t rank, Io why) {
  awaited_ = rank;
  const auto culprit = std::uint32_t(rank), me = std::uint32_t(comm_.rank());
  const auto fails = [&](Trouble trouble) {
    verdict = comm_.condemn({trouble, culprit, me, std::uint32_t(seq)});
    return Status::failed;
  };
  switch (why) {
  case Io::corrupt:
    return fails(Trouble::corrupted);
  case Io::mismatch: // perhaps of a call before, which sent what nobody here took
    verdict = comm_.condemn({Trouble::mismatch, culprit, me,
                             std::uint32_t(std::min(seq, comm_.inlet(rank).note().seq))});
    return Status::failed;
  case Io::left: // it may have left because of somebody else
    if (const std::uint64_t word = comm_.inlet(rank).verdict(); word != 0) {
      verdict = comm_.condemn(comm_.believed(Verdict::of(word), rank));
      return Status::failed;
    }
    return fails(Trouble::left);
  case Io::cut: // said of messages alone
    return fails(Trouble::corrupted);
  case Io::lost:
    lost_ = rank;
    lost_since_ = 0;
    return Status::blocked;
  default:
    begin_wait(rank);
    return Status::blocked;
  }
}

bool Collective::interests(std::vector<pollfd> &into) const {
  if (cursors_.empty() && awaited_ == nobody)
    return false;
  for (std::size_t c = 0; c < cursors_.size(); ++c)
    comm_.outlet(program_->courses[c].to).interests(into);
  if (awaited_ == nobody)
    return phase_ == Phase::exit && !into.empty();
  comm_.inlet(awaited_).interests(into);
  return true;
}

} // namespace unisono
