// Large messages between hosts, in shares that other threads transfer.
//
// The frames of a message are sent over the lanes of a stream in turn, so those of one lane
// are a share of it. I/O threads (net/io_threads.hpp) receive shares: they take the frames of
// one lane of each source, check them, reduce them and store the result. If there are enough
// threads, they send shares as well. The thread that advances the call posts the shares of an
// action or a message, and continues with the call when all have ended. What it sends itself it
// sends when the others have begun to receive.
//
// What a share uses: while it is posted, its thread alone uses its lane of each stream, and
// writes to its frames of the destination, to its scratch memory and to itself. It reads the
// plan, the program, and of the call what does not change during the action (buffers, piece,
// sequence number). The thread that advances the call meanwhile uses no lane and no note of
// these streams (ReceiveStream), and no lane in shares (SendStream).

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "engine/collective.hpp"
#include "engine/comm.hpp"
#include "net/io_threads.hpp"
#include "support/failpoint.hpp"

namespace unisono {

// Every `stride`-th byte range of a frame of an action that receives.
class Collective::ReceiveShare final : public IoJob {
public:
  explicit ReceiveShare(Collective &of) : of_(of) {}

  void prepare(const Movement &m, std::size_t first, std::size_t stride) {
    movement_.emplace(m);
    stride_ = stride;
    if (const std::size_t room = frame_bytes * (m.sources + 1) + line_size; room_ < room) {
      scratch_ = std::make_unique_for_overwrite<std::byte[]>(room);
      room_ = room;
    }
    operands_.resize(m.sources);
    lanes_.clear();
    const auto at = reinterpret_cast<std::uintptr_t>(scratch_.get());
    r_ = {first, 0, scratch_.get() + (line_size - at % line_size) % line_size,
          operands_.data(), nullptr, false};
    result_ = Io::blocked;
    frames_.store(0, std::memory_order_relaxed);
    counted_ = 0;
    awaited_.store(no_rank, std::memory_order_relaxed);
  }
  void use_lanes(std::vector<std::size_t> lanes) {
    lanes_ = std::move(lanes);
    r_.lanes = lanes_.data();
  }

  Step step() override {
    const Io io = of_.receive_frame(*movement_, r_);
    if (io == Io::done) {
      r_.at += stride_;
      frames_.store(frames_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      if (r_.at < movement_->bytes)
        return Step::moved;
    } else if (io == Io::blocked) {
      awaited_.store(r_.awaited, std::memory_order_relaxed);
      return Step::blocked;
    }
    result_ = io;
    return Step::finished;
  }
  void poll_fds(std::vector<pollfd> &into) override {
    ReceiveStream &stream = of_.comm_.receive_stream(r_.awaited);
    if (r_.lanes == nullptr)
      stream.poll_fds(into);
    else
      stream.poll_fds(r_.lanes[r_.arrived], into);
  }

  // While it is posted, too.
  std::size_t awaited() const { return awaited_.load(std::memory_order_relaxed); }
  std::uint64_t new_frames() {
    const std::uint64_t frames = frames_.load(std::memory_order_relaxed);
    return frames - std::exchange(counted_, frames);
  }
  // Otherwise.
  bool ended() const { return result_ != Io::blocked; }
  Io result() const { return result_; }
  const Reception &reception() const { return r_; }

private:
  Collective &of_;
  std::optional<Movement> movement_;
  std::size_t stride_ = 0; // bytes from the beginning of a frame to that of the next
  std::unique_ptr<std::byte[]> scratch_;
  std::size_t room_ = 0; // bytes of it
  std::vector<const void *> operands_;
  std::vector<std::size_t> lanes_;
  Reception r_{};
  Io result_ = Io::blocked;
  std::uint64_t counted_ = 0; // frames that the call has counted; its thread's alone
  // Written by the thread that has the share, read by the one that advances the call.
  std::atomic<std::uint64_t> frames_ = 0;
  std::atomic<std::size_t> awaited_ = no_rank;
};

// The frames of a message that are sent over one lane.
class Collective::SendShare final : public IoJob {
public:
  void prepare(SendStream &stream, std::size_t lane, const Part &message, std::size_t first,
               std::size_t stride) {
    stream_ = &stream;
    lane_ = lane;
    message_ = message;
    at_ = first;
    stride_ = stride;
    result_ = Io::blocked;
  }

  Step step() override {
    if (!stream_->busy(lane_)) {
      const std::size_t some = std::min(frame_bytes, message_.bytes - at_);
      stream_->offer_on(lane_, message_.frame_id, at_ == 0 ? message_.note : nullptr,
                        message_.from + at_, some);
      failpoint("message.offered");
    }
    const Io io = stream_->flush(lane_);
    if (io == Io::blocked)
      return Step::blocked;
    if (io == Io::done && (at_ += stride_) < message_.bytes)
      return Step::moved;
    result_ = io;
    return Step::finished;
  }
  void poll_fds(std::vector<pollfd> &into) override { stream_->poll_fds(lane_, into); }

  // While it is not posted.
  bool ended() const { return result_ != Io::blocked; }
  bool lost() const { return result_ == Io::lost; }
  std::size_t bytes() const { return message_.bytes; }

private:
  SendStream *stream_ = nullptr;
  std::size_t lane_ = 0, at_ = 0, stride_ = 0;
  Part message_{};
  Io result_ = Io::blocked;
};

Collective::Collective(Comm &comm)
    : comm_(comm), threads_(comm.engine().io_threads), operands_(comm.size()),
      addresses_(comm.size()) {}

Collective::~Collective() { Collective::recall(); }

void Collective::recall() {
  alone_ = true;
  for (Receiving &each : receiving_)
    for (auto &share : each.shares)
      threads_->recall(*share);
  for (auto &shares : send_shares_)
    for (auto &share : shares)
      threads_->recall(*share);
}

// Whether other threads receive this: if it is large, and goes to memory of this rank alone.
// A message of one rank ends before the next begins, so each source has its own stream.
bool Collective::receives_in_shares(const Movement &m) const {
  if (num_receiving_ > 0)
    return true;
  if (io_threads_ == 0 || m.bytes < threads_->least_bytes() || m.delivers)
    return false;
  const auto *source = &program_->sources[std::size_t(m.action.first_source)];
  for (std::size_t s = 0; s < m.sources; ++s)
    for (std::size_t t = 0; t < s; ++t)
      if (source[s].home == Program::stream && source[t].home == Program::stream &&
          source[s].rank == source[t].rank)
        return false;
  return true;
}

// Whether other threads receive the data of an action.
bool Collective::receives_in_shares(const Program::Action &action) {
  return io_threads_ > 0 && plan_->coding.codec == nullptr && receives(action) &&
         receives_in_shares(movement(action));
}

// Whether other threads have received all data of the action.
bool Collective::has_received_shares() const {
  const auto is_received = [](const auto &share) {
    return !share->posted() && share->result() == Io::done;
  };
  if (num_receiving_ == 0)
    return false;
  const Receiving &first = receiving_[first_receiving_];
  const auto begin = first.shares.begin();
  return std::all_of(begin, begin + std::ptrdiff_t(first.count), is_received);
}

Status Collective::receive_in_shares(const Movement &m) {
  if (num_receiving_ == 0) {
    awaited_sender_ = no_rank;
    const bool posted = post_receive_shares(m);
    if (posted)
      post_ahead(action_);
    else
      begin_wait(awaited_sender_);
    send_messages();
    if (!posted || unreachable_ != no_rank)
      return Status::blocked;
  }
  bool all = true;
  std::size_t awaited = no_rank;
  for (std::size_t k = 0; k < num_receiving_; ++k) {
    const Receiving &each = receiving_[(first_receiving_ + k) % receiving_.size()];
    for (std::size_t i = 0; i < each.count; ++i) {
      ReceiveShare &share = *each.shares[i];
      const bool posted = share.posted();
      if (!posted && !share.ended()) // it was recalled
        while (share.step() == IoJob::Step::moved)
          ;
      moved += share.new_frames();
      if (posted || !share.ended()) {
        all = all && k > 0;
        awaited = awaited == no_rank ? share.awaited() : awaited;
      } else if (share.result() != Io::done) {
        return receive_share_failed(each, share);
      }
    }
  }
  if (all) {
    end_receive_shares(m);
    post_ahead(action_ + 1);
    return Status::done;
  }
  if (awaited != no_rank)
    awaited_sender_ = awaited;
  return Status::blocked;
}

// Lets other threads begin with actions behind the first one that is being received, as far as
// all of these only copy messages of different ranks to different chunks of the output, and
// wait for nothing: so their order does not matter, and none is waited for while another one's
// bytes are there.
void Collective::post_ahead(std::size_t first) {
  const auto is_copy = [&](const Program::Action &action) {
    return action.end_source - action.first_source == 1 &&
           action.first_wait == action.end_wait && receives(action);
  };
  const auto &actions = program_->actions;
  if (num_receiving_ == 0 || alone_ || !is_copy(actions[first]))
    return;
  std::size_t next = first + num_receiving_;
  for (; num_receiving_ < most_receiving && next < actions.size(); ++next) {
    if (!is_copy(actions[next]))
      return;
    const Movement m = movement(actions[next]);
    if (m.output == nullptr || m.window != nullptr || m.delivers ||
        m.bytes < threads_->least_bytes())
      return;
    for (std::size_t earlier = first; earlier < next; ++earlier)
      if (actions[earlier].chunk == m.action.chunk ||
          source_of(actions[earlier]).rank == source_of(m.action).rank)
        return;
    if (!post_receive_shares(m))
      return;
  }
}

// Of an action that copies.
const Program::Source &Collective::source_of(const Program::Action &action) const {
  return program_->sources[std::size_t(action.first_source)];
}

// False if a stream is not open yet, whose rank is then awaited.
bool Collective::post_receive_shares(const Movement &m) {
  const auto *source = &program_->sources[std::size_t(m.action.first_source)];
  std::size_t lanes = 0; // of each stream, or 1 if they differ or do not take turns
  for (std::size_t s = 0; s < m.sources; ++s) {
    if (source[s].home != Program::stream)
      continue;
    const auto rank = std::size_t(source[s].rank);
    const ReceiveStream &stream = comm_.receive_stream(rank);
    if (!stream.open()) {
      awaited_sender_ = num_receiving_ == 0 ? rank : awaited_sender_;
      return false;
    }
    const std::size_t own = stream.takes_free_lane() ? 1 : stream.num_lanes();
    lanes = lanes == 0 || lanes == own ? own : 1;
  }
  const std::size_t place = (first_receiving_ + num_receiving_) % receiving_.size();
  Receiving &receiving = receiving_[place];
  const std::size_t frames = (m.bytes + frame_bytes - 1) / frame_bytes;
  const std::size_t count = std::min(lanes, frames);
  while (receiving.shares.size() < count)
    receiving.shares.push_back(std::make_unique<ReceiveShare>(*this));
  for (std::size_t i = 0; i < count; ++i) {
    ReceiveShare &share = *receiving.shares[i];
    share.prepare(m, i * frame_bytes, count * frame_bytes);
    if (lanes == 1)
      continue;
    std::vector<std::size_t> own(m.sources, 0);
    for (std::size_t s = 0; s < m.sources; ++s)
      if (source[s].home == Program::stream)
        own[s] = comm_.receive_stream(std::size_t(source[s].rank)).lane_after(i);
    share.use_lanes(std::move(own));
  }
  receiving.count = count;
  ++num_receiving_;
  for (std::size_t i = 0; i < count && !alone_; ++i)
    threads_->post(*receiving.shares[i], (place + i) % receivers(),
                   comm_.layout().block(comm_.rank()).asleep);
  return true;
}

void Collective::end_receive_shares(const Movement &m) {
  const auto *source = &program_->sources[std::size_t(m.action.first_source)];
  const Receiving &first = receiving_[first_receiving_];
  const bool by_lanes = first.shares[0]->reception().lanes != nullptr;
  for (std::size_t s = 0; s < m.sources; ++s) {
    if (source[s].home != Program::stream)
      continue;
    const auto rank = std::size_t(source[s].rank);
    if (by_lanes) {
      comm_.receive_stream(rank).collect_notes();
      comm_.receive_stream(rank).skip((m.bytes + frame_bytes - 1) / frame_bytes);
    }
    count_arrival(rank, true);
  }
  first_receiving_ = (first_receiving_ + 1) % receiving_.size();
  --num_receiving_;
}

// The others end as well: what is left of the message cannot be used. A frame of another
// call is described by that call's first frame, which may be on another lane.
Status Collective::receive_share_failed(const Receiving &of, const ReceiveShare &share) {
  recall();
  const Reception &r = share.reception();
  if (share.result() == Io::mismatch && !read_first_frame(*of.shares[0], share)) {
    const std::int64_t now = now_ns();
    mismatch_since_ = mismatch_since_ == 0 ? now : mismatch_since_;
    awaited_sender_ = r.awaited;
    if (now - mismatch_since_ < death_notice_grace)
      return Status::blocked;
  }
  num_receiving_ = 0;
  if (r.unreachable != no_rank) {
    unreachable_ = r.unreachable;
    unreachable_since_ = 0;
    return Status::blocked;
  }
  ReceiveStream &stream = comm_.receive_stream(r.awaited);
  if (r.lanes != nullptr) {
    stream.collect_notes();
    stream.turn_to(r.lanes[r.arrived]);
  }
  return receive_failed(r.awaited, share.result());
}

// Reads the note of a call that a share has met in the middle. False if it has not come yet.
bool Collective::read_first_frame(const ReceiveShare &of_first, const ReceiveShare &share) {
  const Reception &r = share.reception(), &first = of_first.reception();
  if (&share == &of_first || first.at > 0 || first.arrived > r.arrived)
    return true;
  const FrameId frame_id{seq, plan_->fingerprint, std::uint32_t(piece_), 0};
  return comm_.receive_stream(r.awaited)
             .take_on(first.lanes[r.arrived], frame_id, first.scratch, 0) != Io::blocked;
}

bool Collective::sends_in_shares(const SendStream &stream, std::size_t bytes) const {
  return io_threads_ > receivers() && bytes >= threads_->least_bytes() &&
         stream.num_lanes() > 1 && !stream.takes_free_lane();
}

// Whether any message is being sent in shares.
bool Collective::sends_in_shares() const {
  return std::any_of(cursors_.begin(), cursors_.end(),
                     [](const Cursor &cursor) { return cursor.shares > 0; });
}

// The thread that advances the call sends the first share itself.
void Collective::post_send_shares(std::size_t c, const Part &message) {
  SendStream &stream = comm_.send_stream(program_->outgoing[c].to);
  const std::size_t frames = (message.bytes + frame_bytes - 1) / frame_bytes;
  const std::size_t count = std::min(stream.num_lanes(), frames);
  if (send_shares_.size() <= c)
    send_shares_.resize(c + 1);
  auto &shares = send_shares_[c];
  while (shares.size() < count)
    shares.push_back(std::make_unique<SendShare>());
  for (std::size_t i = 0; i < count; ++i)
    shares[i]->prepare(stream, stream.lane_after(i), message, i * frame_bytes,
                       count * frame_bytes);
  stream.skip(frames);
  cursors_[c].shares = count;
  const std::size_t senders = io_threads_ - receivers();
  for (std::size_t i = 1; i < count && !alone_; ++i)
    threads_->post(*shares[i], receivers() + (i - 1) % senders,
                   comm_.layout().block(comm_.rank()).asleep);
}

// Sends the shares that are not posted. True if the message has been sent in full.
bool Collective::sent_in_shares(std::size_t c) {
  Cursor &cursor = cursors_[c];
  bool all = true;
  for (std::size_t i = 0; i < cursor.shares; ++i) {
    SendShare &share = *send_shares_[c][i];
    const bool posted = share.posted();
    if (!posted && !share.ended())
      while (!has_received_shares() && share.step() == IoJob::Step::moved)
        ++moved;
    if (posted || !share.ended()) {
      all = false;
    } else if (share.lost()) {
      unreachable_ = program_->outgoing[c].to;
      return false;
    }
  }
  if (!all)
    return false;
  cursor.shares = 0;
  ++moved;
  end_message(program_->outgoing[c], cursor, send_shares_[c][0]->bytes());
  return true;
}

void Collective::poll_own_shares(std::size_t c, std::vector<pollfd> &into) const {
  for (std::size_t i = 0; i < cursors_[c].shares; ++i)
    if (SendShare &share = *send_shares_[c][i]; !share.posted() && !share.ended())
      share.poll_fds(into);
}

} // namespace unisono
