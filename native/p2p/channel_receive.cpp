// The receiving side of the rings: a message goes to the first receive that matches it. A
// message without one is stored as unexpected, and later ones with its tag wait behind it.

#include <algorithm>
#include <cstring>

#include "engine/comm.hpp"
#include "memory/wait.hpp"
#include "p2p/channel.hpp"
#include "support/failpoint.hpp"

namespace unisono {

Status Channels::receive(Transfer &transfer) {
  const std::size_t first = transfer.peer_ == any ? 0 : transfer.peer_;
  const std::size_t end = transfer.peer_ == any ? comm_.size() : transfer.peer_ + 1;
  for (std::size_t q = first; q < end && !transfer.complete_ && !transfer.size_mismatch_;
       ++q) {
    if (!transfer.claimed_ && match_unexpected(transfer, q))
      break;
    while (!transfer.complete_ && !transfer.size_mismatch_ && poll(q)) {
      ++transfer.moved;
      if (!transfer.claimed_ && match_unexpected(transfer, q))
        break;
    }
  }
  if (transfer.size_mismatch_)
    return failed(transfer, FailureKind::size_mismatch, transfer.source_);
  if (transfer.complete_)
    return Status::done;
  const std::size_t from = failing_source(transfer);
  if (from == any)
    return Status::blocked;
  Inbox &box = inboxes_[from];
  const bool truncated =
      box.ring != nullptr && box.ring->truncated.load(std::memory_order_acquire) != 0;
  if (box.ended == Io::blocked && (!truncated || poll(from) || transfer.complete_))
    return transfer.complete_ ? Status::done : Status::blocked;
  drop_incomplete(box);
  switch (box.ended) {
  case Io::closed:
    return failed(transfer, FailureKind::closed, from);
  case Io::corrupt:
    return failed(transfer, FailureKind::corrupted, from);
  case Io::lost:
    return connection_lost(transfer, from);
  default:
    return failed(transfer, FailureKind::truncated, from);
  }
}

Status Channels::failed(Transfer &transfer, FailureKind kind, std::size_t culprit) const {
  transfer.failure = {kind, std::uint32_t(culprit), std::uint32_t(comm_.rank()), 0};
  return Status::failed;
}

// The rank whose end is a receive's end: the one that it receives from. If that may still be
// any rank, then only when nothing more arrives from all others: the last of them.
std::size_t Channels::failing_source(const Transfer &transfer) const {
  if (transfer.peer_ != any || transfer.claimed_)
    return transfer.claimed_ ? transfer.source_ : transfer.peer_;
  std::size_t last = any;
  for (std::size_t q = 0; q < comm_.size(); ++q)
    if (q != comm_.rank() && inboxes_[q].ended == Io::blocked)
      return any;
    else if (q != comm_.rank())
      last = q;
  return last;
}

std::size_t Channels::awaited_source(const Transfer &transfer) {
  std::lock_guard lock(mutex_);
  return transfer.claimed_ ? transfer.source_ : transfer.peer_;
}

// Reads what has arrived from one rank; whether anything had.
bool Channels::poll(std::size_t source) {
  Inbox &box = inboxes_[source];
  if (!open_inbox(source))
    return false;
  if (comm_.is_remote(source))
    fill_ring(source);
  const bool began = !box.open;
  if (began && !begins(source))
    return false;
  const std::uint64_t taken = box.ring->taken.load(std::memory_order_relaxed);
  const std::size_t there = box.ring->sent.load(std::memory_order_acquire) - taken;
  const std::size_t rest = box.head.bytes - box.filled;
  if (there == 0 && rest > 0)
    return began;
  const std::size_t some = store(box, taken, std::min(there, rest));
  failpoint("recv.part");
  box.filled += some;
  box.ring->taken.store(taken + some, std::memory_order_release);
  wake_sleepers(comm_.layout(), comm_.size());
  if (box.filled == box.head.bytes)
    end(box);
  return true;
}

// Whether the next message has begun. Between hosts a header may arrive in parts.
bool Channels::begins(std::size_t source) {
  Inbox &box = inboxes_[source];
  const std::uint64_t taken = box.ring->taken.load(std::memory_order_relaxed);
  MessageHeader head;
  if (box.ring->sent.load(std::memory_order_acquire) - taken < sizeof head)
    return false;
  copy_out(reinterpret_cast<std::byte *>(&head), bytes_of(box.ring), capacity_, taken,
           sizeof head);
  if (head.bytes > max_message_bytes) {
    end_stream(box, Io::corrupt);
    return false;
  }
  begin(source, head);
  box.ring->taken.store(taken + sizeof head, std::memory_order_release);
  wake_sleepers(comm_.layout(), comm_.size());
  return true;
}

// Copies bytes of the ring to the message's destination; how many fitted.
std::size_t Channels::store(Inbox &box, std::uint64_t from, std::size_t bytes) {
  std::byte *to = nullptr;
  if (box.into) {
    to = box.into->data_ + box.filled;
  } else if (!box.unexpected.back().lost) {
    const auto room = box.unexpected.back().data.room(box.head.bytes - box.filled);
    to = room.data();
    bytes = std::min(bytes, room.size());
    box.unexpected.back().data.add(bytes);
  }
  if (to != nullptr && bytes > 0)
    copy_out(to, bytes_of(box.ring), capacity_, from, bytes);
  return bytes;
}

// A message is complete.
void Channels::end(Inbox &box) {
  box.open = false;
  if (!box.into && box.unexpected.back().lost)
    box.unexpected.pop_back();
  if (box.into) {
    box.into->complete_ = true;
    std::erase(posted_, box.into);
    box.into = nullptr;
  }
}

// Reads on in a message whose receive was abandoned; true when nothing more of it will come.
bool Channels::skip_lost(std::size_t source) {
  const Inbox &box = inboxes_[source];
  const auto in_lost = [&] {
    return box.open && !box.into && box.unexpected.back().lost;
  };
  const bool ended = has_ended(source); // before the last bytes are read
  while (in_lost() && poll(source))
    ;
  return ended || !in_lost();
}

// Whether a rank sends nothing more than it has sent by now, or nobody waits for that.
bool Channels::has_ended(std::size_t source) const {
  const Inbox &box = inboxes_[source];
  return box.ended != Io::blocked || comm_.is_gone(source) ||
         box.ring->truncated.load(std::memory_order_acquire) != 0 ||
         comm_.failure().kind != FailureKind::none;
}

// When nothing more arrives: a message without its end can match no receive.
void Channels::drop_incomplete(Inbox &box) {
  if (box.open && !box.into && !box.unexpected.back().lost)
    box.unexpected.back() = {box.head, {}, true};
}

// A message begins: it goes to the matching receive, or is stored as unexpected.
void Channels::begin(std::size_t source, const MessageHeader &head) {
  Inbox &box = inboxes_[source];
  // Behind an unexpected message with the same tag, it is stored as unexpected too.
  const bool behind =
      std::any_of(box.unexpected.begin(), box.unexpected.end(),
                  [&](const Unexpected &a) { return !a.lost && a.head.tag == head.tag; });
  std::shared_ptr<Transfer> taker = behind ? nullptr : match_posted(source, head.tag);
  if (taker)
    deliver(*taker, source, head);
  if (!taker || taker->size_mismatch_) {
    // This may fail for lack of memory, so it is done before anything is changed.
    box.unexpected.push_back({head, {}});
    std::erase(posted_, taker);
    taker = nullptr;
  } else {
    taker->claimed_ = true;
  }
  box.head = head;
  box.into = std::move(taker);
  box.open = true;
  box.filled = 0;
}

// The first receive that matches such a message.
std::shared_ptr<Transfer> Channels::match_posted(std::size_t source,
                                                 std::int64_t tag) const {
  for (const auto &p : posted_)
    if (p->wants(source, tag))
      return p;
  return nullptr;
}

void Channels::deliver(Transfer &transfer, std::size_t source, const MessageHeader &head) {
  transfer.source_ = source;
  transfer.message_bytes_ = head.bytes;
  transfer.size_mismatch_ = head.bytes != transfer.bytes_ || head.type != transfer.type_;
}

bool Channels::match_unexpected(Transfer &transfer, std::size_t source) {
  Inbox &box = inboxes_[source];
  for (const auto &p : posted_) { // the first posted receive is served first
    if (p.get() == &transfer)
      break;
    if (p->wants(source, transfer.tag_))
      return false;
  }
  for (auto at = box.unexpected.begin(); at != box.unexpected.end(); ++at) {
    if (at->lost || at->head.tag != transfer.tag_)
      continue;
    if (at->data.size() < at->head.bytes)
      return false; // incomplete; messages behind it wait for it
    deliver(transfer, source, at->head);
    if (!transfer.size_mismatch_) {
      at->data.copy_to(transfer.data_);
      box.unexpected.erase(at);
    }
    transfer.complete_ = true;
    std::erase_if(posted_, [&](const auto &p) { return p.get() == &transfer; });
    return true;
  }
  return false;
}

} // namespace unisono
