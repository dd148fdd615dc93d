// The receiving end of the rings: a message goes to the first who asked for its tag; one that
// nobody has asked for yet is put aside, and those of its tag that follow stay behind it.

#include <algorithm>
#include <cstring>

#include "channel.hpp"
#include "comm.hpp"
#include "failpoint.hpp"
#include "wait.hpp"

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
  const std::byte *bytes = bytes_of(box.ring);
  std::uint64_t taken = box.ring->taken.load(std::memory_order_relaxed);
  std::size_t there = box.ring->sent.load(std::memory_order_acquire) - taken;
  if (there == 0)
    return false;
  if (!box.open) {
    MessageHead head;
    copy_out(reinterpret_cast<std::byte *>(&head), bytes, capacity_, taken, sizeof head);
    begin(source, head);
    taken += sizeof head;
    there -= sizeof head;
  }
  const std::size_t some = std::min<std::size_t>(there, box.head.bytes - box.filled);
  std::byte *to = box.into ? box.into->data_ : box.aside.back().data.get();
  copy_out(to + box.filled, bytes, capacity_, taken, some);
  failpoint("recv.part");
  box.filled += some;
  if (!box.into)
    box.aside.back().filled = box.filled;
  box.ring->taken.store(taken + some, std::memory_order_release);
  ring(comm_.layout(), comm_.size());
  if (box.filled == box.head.bytes) {
    box.open = false;
    if (!box.into && box.aside.back().lost)
      box.aside.pop_back();
    if (box.into) {
      box.into->complete_ = true;
      std::erase(posted_, box.into);
      box.into = nullptr;
    }
  }
  return true;
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
    box.aside.push_back({head, std::make_unique<std::byte[]>(head.bytes), 0});
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
    if (at->filled < at->head.bytes)
      return false; // still coming; those behind it must wait for it
    deliver(transfer, source, at->head);
    if (!transfer.misfit_) {
      std::memcpy(transfer.data_, at->data.get(), at->head.bytes);
      box.aside.erase(at);
    }
    transfer.complete_ = true;
    std::erase_if(posted_, [&](const auto &p) { return p.get() == &transfer; });
    return true;
  }
  return false;
}

} // namespace unisono
