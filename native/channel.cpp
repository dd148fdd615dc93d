#include "channel.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "comm.hpp"
#include "failpoint.hpp"
#include "wait.hpp"

namespace unisono {

namespace {

constexpr std::size_t most_outbox = std::size_t(8) << 20;

// Smaller where there are many ranks, so that an outbox stays within bounds.
std::size_t ring_capacity(std::size_t n) {
  std::size_t capacity = std::size_t(256) << 10;
  while (capacity > 4096 && capacity * n > most_outbox)
    capacity /= 2;
  return capacity;
}

void copy_in(std::byte *ring, std::size_t capacity, std::uint64_t at, const std::byte *from,
             std::size_t bytes) {
  const std::size_t first = std::min(bytes, capacity - at % capacity);
  std::memcpy(ring + at % capacity, from, first);
  std::memcpy(ring, from + first, bytes - first);
}

void copy_out(std::byte *to, const std::byte *ring, std::size_t capacity, std::uint64_t at,
              std::size_t bytes) {
  const std::size_t first = std::min(bytes, capacity - at % capacity);
  std::memcpy(to, ring + at % capacity, first);
  std::memcpy(to + first, ring, bytes - first);
}

constexpr std::size_t largest_frame = 64 << 10;

} // namespace

Transfer::Transfer(Comm &comm, Direction direction, std::size_t peer, std::int64_t tag,
                   void *data, std::size_t bytes, std::uint64_t type)
    : comm_(comm), direction_(direction), peer_(peer), tag_(tag),
      data_(static_cast<std::byte *>(data)), bytes_(bytes), type_(type) {
  breaks_all = false;
  sends = direction == Direction::send && peer != comm.rank() ? bytes : 0;
}

Status Transfer::advance() { return comm_.post().advance(*this); }

bool Transfer::hindered_by(std::size_t rank) const {
  if (direction_ == Direction::send)
    return rank == peer_;
  if (peer_ != Post::any)
    return rank == peer_ && comm_.post().drained(rank);
  for (std::size_t q = 0; q < comm_.size(); ++q) // any other may still send
    if (q != comm_.rank() && !(comm_.gone(q) && comm_.post().drained(q)))
      return false;
  return true;
}

std::vector<Need> Transfer::needs() const {
  std::vector<Need> all;
  for (std::size_t q = 0; q < comm_.size(); ++q)
    if (q == peer_ || (peer_ == Post::any && q != comm_.rank()))
      all.push_back({q, true, 0});
  return all;
}

Post::Post(Comm &comm)
    : comm_(comm), capacity_(ring_capacity(comm.size())), inboxes_(comm.size()),
      outboxes_(comm.size()) {}

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
  for (;;) {
    const Io io = box.outlet->idle() ? Io::done : box.outlet->pump();
    if (io == Io::lost)
      return false;
    ring->taken.store(box.outlet->left(box.shipped), std::memory_order_release);
    const std::size_t at = box.shipped % capacity_;
    const std::size_t some = std::min({largest_frame, std::size_t(sent - box.shipped),
                                       capacity_ - at});
    if (some == 0 ||
        !box.outlet->offer({box.shipped}, nullptr, bytes_of(ring) + at, some, box.shipped))
      return true;
    box.shipped += some;
  }
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

bool Transfer::interests(std::vector<pollfd> &into) const {
  comm_.post().interests(*this, into);
  return peer_ != Post::any && comm_.far(peer_) && !into.empty();
}

void Post::enter(const std::shared_ptr<Transfer> &transfer) {
  std::lock_guard lock(mutex_);
  if (transfer->direction_ == Transfer::Direction::send)
    outboxes_[transfer->peer_].waiting.push_back(transfer.get());
  else
    posted_.push_back(transfer);
}

// For one that ends without success. A message half received is read to its end and lost;
// after one half sent nothing else can be sent that way.
bool Post::withdraw(Transfer &transfer) {
  std::lock_guard lock(mutex_);
  if (transfer.complete_ && !transfer.misfit_)
    return false;
  if (transfer.head_sent_ && transfer.done_ < transfer.bytes_) {
    outboxes_[transfer.peer_].ring->cut.store(1, std::memory_order_release);
    ring(comm_.layout(), comm_.size());
  }
  for (Outbox &box : outboxes_)
    std::erase(box.waiting, &transfer);
  std::erase_if(posted_, [&](const auto &p) { return p.get() == &transfer; });
  for (Inbox &box : inboxes_)
    if (box.into.get() == &transfer) {
      box.into = nullptr;
      box.aside.push_back({box.head, std::make_unique<std::byte[]>(box.head.bytes), 0, true});
    }
  return true;
}

Status Post::advance(Transfer &transfer) {
  std::lock_guard lock(mutex_);
  const bool sends = transfer.direction_ == Transfer::Direction::send;
  return sends ? send(transfer) : receive(transfer);
}

// Whether everything that rank ever sent has been taken.
bool Post::drained(std::size_t source) {
  std::lock_guard lock(mutex_);
  if (comm_.far(source))
    haul(source);
  if (comm_.far(source) && inboxes_[source].ended == Io::blocked)
    return !inlet(source).open();
  if (!open_inbox(source))
    return comm_.layout().block(source).outbox.load(std::memory_order_acquire) == 0;
  Ring *ring = inboxes_[source].ring;
  return ring->sent.load(std::memory_order_acquire) ==
         ring->taken.load(std::memory_order_relaxed);
}

void Post::close() {
  std::lock_guard lock(mutex_);
  if (outbox_ == 0)
    return;
  for (Outbox &box : outboxes_)
    if (box.outlet)
      box.outlet->leave(0);
  for (const Outbox &box : outboxes_)
    if (box.ring->sent.load(std::memory_order_relaxed) !=
        box.ring->taken.load(std::memory_order_acquire))
      return; // somebody may still want it; it goes with this process
  comm_.layout().block(comm_.rank()).outbox.store(0, std::memory_order_release);
  comm_.mesh().drop(outbox_);
}

bool Post::open_outbox() {
  RankBlock &mine = comm_.layout().block(comm_.rank());
  if (outboxes_[comm_.rank()].ring != nullptr)
    return true;
  const std::size_t stride = sizeof(Ring) + capacity_;
  const std::uint64_t id = outbox_ = comm_.mesh().create(stride * comm_.size());
  const auto memory = comm_.mesh().find(comm_.mesh().rank(), id);
  for (std::size_t q = 0; q < comm_.size(); ++q)
    outboxes_[q].ring = reinterpret_cast<Ring *>(memory->data() + q * stride);
  inboxes_[comm_.rank()].memory = memory;
  inboxes_[comm_.rank()].ring = outboxes_[comm_.rank()].ring;
  mine.outbox.store(id, std::memory_order_release);
  return true;
}

bool Post::open_inbox(std::size_t source) {
  Inbox &box = inboxes_[source];
  if (box.ring != nullptr)
    return true;
  if (comm_.far(source)) {
    box.own.resize(sizeof(Ring) + capacity_ + line_size);
    const auto at = reinterpret_cast<std::uintptr_t>(box.own.data());
    box.ring = new (box.own.data() + (line_size - at % line_size) % line_size) Ring{};
    return true;
  }
  const std::uint64_t id =
      comm_.layout().block(source).outbox.load(std::memory_order_acquire);
  if (id == 0)
    return false;
  box.memory = comm_.mesh().find(comm_.world_rank(source), id);
  if (!box.memory)
    return false; // its descriptor is still on the way
  const std::size_t stride = sizeof(Ring) + capacity_;
  box.ring = reinterpret_cast<Ring *>(box.memory->data() + comm_.rank() * stride);
  return true;
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

Status Post::send(Transfer &transfer) {
  Outbox &box = outboxes_[transfer.peer_];
  if (transfer.complete_)
    return Status::done; // by another thread
  const bool far = comm_.far(transfer.peer_);
  if (far && box.ring != nullptr && !ship(transfer.peer_))
    return severed(transfer, transfer.peer_);
  if (box.waiting.empty() || box.waiting.front() != &transfer)
    return Status::blocked;
  open_outbox();
  Ring *ring = box.ring;
  if (ring->cut.load(std::memory_order_relaxed) != 0) {
    transfer.verdict = {Trouble::cut, std::uint32_t(comm_.rank()),
                        std::uint32_t(comm_.rank()), 0};
    return Status::failed;
  }
  std::byte *bytes = bytes_of(ring);
  std::uint64_t sent = ring->sent.load(std::memory_order_relaxed);
  const std::uint64_t before = sent;
  std::size_t room = capacity_ - (sent - ring->taken.load(std::memory_order_acquire));
  if (!transfer.head_sent_) {
    if (room < sizeof(MessageHead))
      return Status::blocked;
    const MessageHead head{transfer.bytes_, transfer.tag_, transfer.type_};
    copy_in(bytes, capacity_, sent, reinterpret_cast<const std::byte *>(&head), sizeof head);
    sent += sizeof head;
    room -= sizeof head;
    transfer.head_sent_ = true;
    failpoint("send.header");
  }
  const std::size_t some = std::min(room, transfer.bytes_ - transfer.done_);
  if (some > 0) {
    copy_in(bytes, capacity_, sent, transfer.data_ + transfer.done_, some);
    sent += some;
    transfer.done_ += some;
    failpoint("send.part");
  }
  if (sent != before) {
    ring->sent.store(sent, std::memory_order_release);
    ++transfer.moved;
    unisono::ring(comm_.layout(), comm_.size());
  }
  if (transfer.done_ < transfer.bytes_) {
    if (far)
      (void)ship(transfer.peer_);
    return Status::blocked;
  }
  if (far) {
    transfer.end_ = sent;
    (void)ship(transfer.peer_);
    if (ring->taken.load(std::memory_order_relaxed) < transfer.end_)
      return Status::blocked;
  }
  box.waiting.pop_front();
  transfer.complete_ = true;
  return Status::done;
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
    taken += sizeof head;
    there -= sizeof head;
    box.head = head;
    box.into = std::move(taker);
    box.open = true;
    box.filled = 0;
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

// The first receive that a message of this tag is for.
std::shared_ptr<Transfer> Post::wanted(std::size_t source, std::int64_t tag) const {
  for (const auto &p : posted_)
    if (!p->claimed_ && (p->peer_ == source || p->peer_ == any) && p->tag_ == tag)
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
    if (!p->claimed_ && p->tag_ == transfer.tag_ && (p->peer_ == source || p->peer_ == any))
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

} // namespace unisono
