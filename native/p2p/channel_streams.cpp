// Between hosts: the bytes of the sender's ring are sent over a stream, and copied into the
// receiver's ring. Both sides work on rings, as within a host.

#include <algorithm>

#include "engine/comm.hpp"
#include "p2p/channel.hpp"
#include "support/failpoint.hpp"

namespace unisono {

namespace {

constexpr std::size_t largest_frame = 64 << 10;

} // namespace

void Channels::make_streams() {
  for (std::size_t q = 0; q < comm_.size(); ++q)
    if (comm_.is_remote(q)) {
      outboxes_[q].send_stream = std::make_unique<SendStream>();
      inboxes_[q].receive_stream = std::make_unique<ReceiveStream>();
    }
}

// Sends the bytes of the ring to another host, as far as possible; false if the connection
// is lost.
bool Channels::send_ring(std::size_t to) {
  Outbox &box = outboxes_[to];
  if (!send_stream(to).open())
    return true;
  ByteRing *ring = box.ring;
  const std::uint64_t sent = ring->sent.load(std::memory_order_relaxed);
  const bool cut = ring->truncated.load(std::memory_order_relaxed) != 0;
  for (;;) {
    const Io io = box.send_stream->idle() ? Io::done : box.send_stream->flush();
    if (io == Io::lost)
      return false;
    ring->taken.store(box.send_stream->first_unsent(box.shipped),
                      std::memory_order_release);
    const std::size_t at = box.shipped % capacity_;
    const std::size_t most = std::min({largest_frame, std::size_t(sent - box.shipped),
                                       capacity_ - at});
    std::size_t some = most == 0 ? 0 : std::max<std::size_t>(
                                           allowed("message.frame", most), 1);
    if (some == 0 && !(cut && !box.truncation_sent && box.send_stream->send_truncated()))
      return true;
    if (some == 0)
      box.truncation_sent = true;
    else if (!box.send_stream->offer({box.shipped}, nullptr, bytes_of(ring) + at, some,
                                box.shipped))
      return true;
    box.shipped += some;
  }
}

// Whether all bytes of this ring have been handed to the kernel.
bool Channels::all_has_left(const Outbox &box) const {
  const bool cut = box.ring->truncated.load(std::memory_order_relaxed) != 0;
  return box.send_stream->idle() && (box.truncation_sent || !cut) &&
         box.shipped == box.ring->sent.load(std::memory_order_relaxed);
}

bool Channels::settle_abandoned() {
  if (abandoned_.load(std::memory_order_acquire) == 0)
    return false;
  std::lock_guard lock(mutex_);
  const auto settle = [this](bool &abandoned, bool settled) {
    if (!settled)
      return;
    abandoned = false;
    abandoned_.fetch_sub(1, std::memory_order_release);
  };
  for (std::size_t q = 0; q < comm_.size(); ++q) {
    if (Outbox &box = outboxes_[q]; box.abandoned)
      settle(box.abandoned, !send_ring(q) || all_has_left(box));
    if (Inbox &box = inboxes_[q]; box.abandoned)
      settle(box.abandoned, skip_lost(q));
  }
  return abandoned_.load(std::memory_order_relaxed) != 0;
}

void Channels::abandoned_poll_fds(std::vector<pollfd> &into) {
  if (abandoned_.load(std::memory_order_acquire) == 0)
    return;
  std::lock_guard lock(mutex_);
  for (std::size_t q = 0; q < comm_.size(); ++q) {
    if (outboxes_[q].abandoned)
      send_stream(q).poll_fds(into);
    if (inboxes_[q].abandoned && comm_.is_remote(q))
      receive_stream(q).poll_fds(into);
  }
}

// Copies what has arrived from another host into its ring, as far as it fits.
void Channels::fill_ring(std::size_t source) {
  Inbox &box = inboxes_[source];
  if (!receive_stream(source).open() || !open_inbox(source))
    return;
  box.frame.resize(largest_frame);
  while (box.ended == Io::blocked) {
    if (box.framed == 0) {
      const Io io =
          box.receive_stream->take_any(box.frame.data(), largest_frame, &box.framed);
      if (io != Io::done) {
        box.framed = 0;
        if (io != Io::blocked)
          end_stream(box, io);
        return;
      }
    }
    const std::uint64_t sent = box.ring->sent.load(std::memory_order_relaxed);
    if (capacity_ - (sent - box.ring->taken.load(std::memory_order_acquire)) < box.framed)
      return;
    copy_in(bytes_of(box.ring), capacity_, sent, box.frame.data(), box.framed);
    box.ring->sent.store(sent + box.framed, std::memory_order_release);
    box.framed = 0;
  }
}

// Nothing more arrives. Unless its sender has said so itself, it may be in the middle of a
// message, and would wait until this rank reads the rest.
void Channels::end_stream(Inbox &box, Io why) {
  box.ended = why;
  if (why == Io::truncated)
    box.ring->truncated.store(1, std::memory_order_release);
  if (box.receive_stream && (why == Io::lost || why == Io::corrupt))
    box.receive_stream->reject();
}

void Channels::poll_fds(const Transfer &transfer, std::vector<pollfd> &into) {
  std::lock_guard lock(mutex_);
  for (std::size_t q = 0; q < comm_.size(); ++q) {
    if (!comm_.is_remote(q) || (transfer.peer_ != any && transfer.peer_ != q))
      continue;
    if (transfer.direction_ == Transfer::Direction::send)
      send_stream(q).poll_fds(into);
    else if (receive_stream(q).open() && inboxes_[q].framed == 0 &&
             inboxes_[q].ended == Io::blocked)
      receive_stream(q).poll_fds(into);
  }
}

// A connection has ended without a close frame. Most likely its rank has died: then a death
// notice follows.
Status Channels::connection_lost(Transfer &transfer, std::size_t from) {
  const std::int64_t now = now_ns();
  if (transfer.lost_since_ == 0)
    transfer.lost_since_ = now;
  if (now - transfer.lost_since_ < death_notice_grace)
    return Status::blocked;
  const FailureKind kind =
      comm_.has_left(from) ? FailureKind::closed : FailureKind::connection_lost;
  return failed(transfer, kind, from);
}

} // namespace unisono
