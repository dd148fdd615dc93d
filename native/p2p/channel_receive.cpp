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
  const std::size_t n = comm_.size();
  const bool anyone = transfer.peer_ == any;
  const std::size_t from = anyone ? 0 : transfer.peer_;
  const std::size_t end = anyone ? n : transfer.peer_ + 1;
  for (std::size_t q = from; q < end && !transfer.complete_ && !transfer.size_mismatch_;
       ++q) {
    if (!transfer.claimed_ && match_unexpected(transfer, q))
      break;
    while (!transfer.complete_ && !transfer.size_mismatch_ && poll(q)) {
      ++transfer.moved;
      if (!transfer.claimed_ && match_unexpected(transfer, q))
        break;
    }
  }
  const bool given_up = !anyone && !transfer.complete_ && inboxes_[from].ring != nullptr &&
                        inboxes_[from].ring->truncated.load(std::memory_order_acquire) != 0;
  const Io ended = anyone ? Io::blocked : inboxes_[from].ended;
  if ((ended == Io::closed || ended == Io::corrupt) && !transfer.complete_) {
    transfer.failure = {ended == Io::closed ? FailureKind::closed : FailureKind::corrupted,
                        std::uint32_t(from), std::uint32_t(comm_.rank()), 0};
    return Status::failed;
  }
  if (ended == Io::lost && !transfer.complete_)
    return connection_lost(transfer, from);
  if (given_up && !poll(from) && !transfer.complete_) {
    transfer.failure = {FailureKind::truncated, std::uint32_t(from),
                        std::uint32_t(comm_.rank()), 0};
    return Status::failed;
  }
  if (transfer.size_mismatch_) {
    transfer.failure = {FailureKind::size_mismatch, std::uint32_t(transfer.source_),
                        std::uint32_t(comm_.rank()), 0};
    return Status::failed;
  }
  return transfer.complete_ ? Status::done : Status::blocked;
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
    box.ended = Io::corrupt;
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
