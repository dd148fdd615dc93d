// Between hosts: what is put into the ring at one end is shipped over a stream, and hauled
// into the ring at the other. Whoever sends or receives finds rings, as within a host.

#include <algorithm>

#include "engine/comm.hpp"
#include "p2p/channel.hpp"
#include "support/failpoint.hpp"

namespace unisono {

namespace {

constexpr std::size_t largest_frame = 64 << 10;

} // namespace

void Post::part() {
  for (std::size_t q = 0; q < comm_.size(); ++q)
    if (comm_.far(q)) {
      outboxes_[q].outlet = std::make_unique<Outlet>();
      inboxes_[q].inlet = std::make_unique<Inlet>();
    }
}

// Sends what is in the ring to another host, as far as it goes; false if nobody is there.
bool Post::ship(std::size_t to) {
  Outbox &box = outboxes_[to];
  if (!outlet(to).open())
    return true;
  Ring *ring = box.ring;
  const std::uint64_t sent = ring->sent.load(std::memory_order_relaxed);
  const bool cut = ring->cut.load(std::memory_order_relaxed) != 0;
  for (;;) {
    const Io io = box.outlet->idle() ? Io::done : box.outlet->pump();
    if (io == Io::lost)
      return false;
    ring->taken.store(box.outlet->left(box.shipped), std::memory_order_release);
    const std::size_t at = box.shipped % capacity_;
    const std::size_t most = std::min({largest_frame, std::size_t(sent - box.shipped),
                                       capacity_ - at});
    const std::size_t some = most == 0 ? 0 : std::max<std::size_t>(
                                                 allowed("message.frame", most), 1);
    if (some == 0 && !(cut && !box.cut_told && box.outlet->cut()))
      return true;
    if (some == 0)
      box.cut_told = true;
    else if (!box.outlet->offer({box.shipped}, nullptr, bytes_of(ring) + at, some,
                                box.shipped))
      return true;
    box.shipped += some;
  }
}

// Whether the other end has all there is to be had of this ring, as far as sockets tell.
bool Post::all_has_left(const Outbox &box) const {
  const bool cut = box.ring->cut.load(std::memory_order_relaxed) != 0;
  return box.outlet->idle() && (box.cut_told || !cut) &&
         box.shipped == box.ring->sent.load(std::memory_order_relaxed);
}

bool Post::ship_abandoned() {
  if (abandoned_.load(std::memory_order_acquire) == 0)
    return false;
  std::lock_guard lock(mutex_);
  for (std::size_t q = 0; q < outboxes_.size(); ++q) {
    Outbox &box = outboxes_[q];
    if (box.abandoned && (!ship(q) || all_has_left(box))) {
      box.abandoned = false;
      abandoned_.fetch_sub(1, std::memory_order_release);
    }
  }
  return abandoned_.load(std::memory_order_relaxed) != 0;
}

void Post::abandoned_interests(std::vector<pollfd> &into) {
  if (abandoned_.load(std::memory_order_acquire) == 0)
    return;
  std::lock_guard lock(mutex_);
  for (const Outbox &box : outboxes_)
    if (box.abandoned)
      box.outlet->interests(into);
}

// Puts what has come from another host into its ring, as far as there is room.
void Post::haul(std::size_t source) {
  Inbox &box = inboxes_[source];
  if (!inlet(source).open() || !open_inbox(source))
    return;
  box.frame.resize(largest_frame);
  while (box.ended == Io::blocked) {
    if (box.framed == 0) {
      const Io io = box.inlet->take_any(box.frame.data(), largest_frame, &box.framed);
      if (io != Io::done) {
        box.framed = 0;
        box.ended = io;
        if (io == Io::cut)
          box.ring->cut.store(1, std::memory_order_release);
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

void Post::interests(const Transfer &transfer, std::vector<pollfd> &into) {
  std::lock_guard lock(mutex_);
  for (std::size_t q = 0; q < comm_.size(); ++q) {
    if (!comm_.far(q) || (transfer.peer_ != any && transfer.peer_ != q))
      continue;
    if (transfer.direction_ == Transfer::Direction::send)
      outlet(q).interests(into);
    else if (inlet(q).open() && inboxes_[q].framed == 0)
      inlet(q).interests(into);
  }
}

// A connection has ended without a word. Most likely its rank has died: we shall know in a
// moment.
Status Post::severed(Transfer &transfer, std::size_t from) {
  const std::int64_t now = now_ns();
  if (transfer.lost_since_ == 0)
    transfer.lost_since_ = now;
  if (now - transfer.lost_since_ < word_of_death)
    return Status::blocked;
  transfer.verdict = {Trouble::severed, std::uint32_t(from), std::uint32_t(comm_.rank()), 0};
  return Status::failed;
}

} // namespace unisono
