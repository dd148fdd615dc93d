// The receiving end of the rings: a message goes to the first who asked for its tag; one that
// nobody has asked for yet is put aside, and those of its tag that follow stay behind it.

#include <algorithm>
#include <cstring>

#include "engine/comm.hpp"
#include "memory/wait.hpp"
#include "p2p/channel.hpp"
#include "support/failpoint.hpp"

namespace unisono {

Status Post::receive(Transfer &transfer) {
  const std::size_t n = comm_.size();
  const bool anyone = transfer.peer_ == any;
  const std::size_t from = anyone ? 0 : transfer.peer_;
  const std::size_t end = anyone ? n : transfer.peer_ + 1;
  for (std::size_t q = from; q < end && !transfer.complete_ && !transfer.misfit_; ++q) {
    if (!transfer.claimed_ && from_aside(transfer, q))
      break;
    while (!transfer.complete_ && !transfer.misfit_ && pump(q)) {
      ++transfer.moved;
      if (!transfer.claimed_ && from_aside(transfer, q))
        break;
    }
  }
  const bool given_up = !anyone && !transfer.complete_ && inboxes_[from].ring != nullptr &&
                        inboxes_[from].ring->cut.load(std::memory_order_acquire) != 0;
  const Io ended = anyone ? Io::blocked : inboxes_[from].ended;
  if ((ended == Io::left || ended == Io::corrupt) && !transfer.complete_) {
    transfer.verdict = {ended == Io::left ? Trouble::left : Trouble::corrupted,
                        std::uint32_t(from), std::uint32_t(comm_.rank()), 0};
    return Status::failed;
  }
  if (ended == Io::lost && !transfer.complete_)
    return severed(transfer, from);
  if (given_up && !pump(from) && !transfer.complete_) {
    transfer.verdict = {Trouble::cut, std::uint32_t(from), std::uint32_t(comm_.rank()), 0};
    return Status::failed;
  }
  if (transfer.misfit_) {
    transfer.verdict = {Trouble::misfit, std::uint32_t(transfer.source_),
                        std::uint32_t(comm_.rank()), 0};
    return Status::failed;
  }
  return transfer.complete_ ? Status::done : Status::blocked;
}

// Takes what has come from one rank; whether anything had.
bool Post::pump(std::size_t source) {
  Inbox &box = inboxes_[source];
  if (!open_inbox(source))
    return false;
  if (comm_.far(source))
    haul(source);
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
  ring(comm_.layout(), comm_.size());
  if (box.filled == box.head.bytes)
    end(box);
  return true;
}

// Whether the next message has begun. Between hosts a head may come in parts.
bool Post::begins(std::size_t source) {
  Inbox &box = inboxes_[source];
  const std::uint64_t taken = box.ring->taken.load(std::memory_order_relaxed);
  MessageHead head;
  if (box.ring->sent.load(std::memory_order_acquire) - taken < sizeof head)
    return false;
  copy_out(reinterpret_cast<std::byte *>(&head), bytes_of(box.ring), capacity_, taken,
           sizeof head);
  if (head.bytes > most_message_bytes) {
    box.ended = Io::corrupt;
    return false;
  }
  begin(source, head);
  box.ring->taken.store(taken + sizeof head, std::memory_order_release);
  ring(comm_.layout(), comm_.size());
  return true;
}

// Puts bytes of the ring where the message goes; how many found room.
std::size_t Post::store(Inbox &box, std::uint64_t from, std::size_t bytes) {
  std::byte *to = nullptr;
  if (box.into) {
    to = box.into->data_ + box.filled;
  } else if (!box.aside.back().lost) {
    const auto room = box.aside.back().data.room(box.head.bytes - box.filled);
    to = room.data();
    bytes = std::min(bytes, room.size());
    box.aside.back().data.add(bytes);
  }
  if (to != nullptr && bytes > 0)
    copy_out(to, bytes_of(box.ring), capacity_, from, bytes);
  return bytes;
}

// A message is there entirely.
void Post::end(Inbox &box) {
  box.open = false;
  if (!box.into && box.aside.back().lost)
    box.aside.pop_back();
  if (box.into) {
    box.into->complete_ = true;
    std::erase(posted_, box.into);
    box.into = nullptr;
  }
}

// A message begins: it goes to whoever asked for it, or aside.
void Post::begin(std::size_t source, const MessageHead &head) {
  Inbox &box = inboxes_[source];
  // Behind another of its tag that was put aside, it is put aside too.
  const bool behind = std::any_of(box.aside.begin(), box.aside.end(), [&](const Aside &a) {
    return !a.lost && a.head.tag == head.tag;
  });
  std::shared_ptr<Transfer> taker = behind ? nullptr : wanted(source, head.tag);
  if (taker)
    deliver(*taker, source, head);
  if (!taker || taker->misfit_) {
    // May fail for want of memory, so before anything is changed.
    box.aside.push_back({head, {}});
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

// The first receive that a message of this tag is for.
std::shared_ptr<Transfer> Post::wanted(std::size_t source, std::int64_t tag) const {
  for (const auto &p : posted_)
    if (p->wants(source, tag))
      return p;
  return nullptr;
}

void Post::deliver(Transfer &transfer, std::size_t source, const MessageHead &head) {
  transfer.source_ = source;
  transfer.message_bytes_ = head.bytes;
  transfer.misfit_ = head.bytes != transfer.bytes_ || head.type != transfer.type_;
}

bool Post::from_aside(Transfer &transfer, std::size_t source) {
  Inbox &box = inboxes_[source];
  for (const auto &p : posted_) { // whoever asked first is served first
    if (p.get() == &transfer)
      break;
    if (p->wants(source, transfer.tag_))
      return false;
  }
  for (auto at = box.aside.begin(); at != box.aside.end(); ++at) {
    if (at->lost || at->head.tag != transfer.tag_)
      continue;
    if (at->data.size() < at->head.bytes)
      return false; // still coming; those behind it must wait for it
    deliver(transfer, source, at->head);
    if (!transfer.misfit_) {
      at->data.copy_to(transfer.data_);
      box.aside.erase(at);
    }
    transfer.complete_ = true;
    std::erase_if(posted_, [&](const auto &p) { return p.get() == &transfer; });
    return true;
  }
  return false;
}

} // namespace unisono
