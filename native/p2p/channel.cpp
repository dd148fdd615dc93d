// The sending side of the rings, and what both sides have in common: a transfer is
// submitted, advanced by any thread, and cancelled if it fails.

#include "p2p/channel.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "engine/comm.hpp"
#include "engine/progress.hpp"
#include "memory/wait.hpp"
#include "support/failpoint.hpp"

namespace unisono {

Transfer::Transfer(Comm &comm, Direction direction, std::size_t peer, std::int64_t tag,
                   void *data, std::size_t bytes, std::uint64_t type)
    : comm_(comm), direction_(direction), peer_(peer), tag_(tag),
      data_(static_cast<std::byte *>(data)), bytes_(bytes), type_(type) {
  aborts_comm = false;
  sends = direction == Direction::send && peer != comm.rank() ? bytes : 0;
}

Status Transfer::advance() { return comm_.channels().advance(*this); }

bool Transfer::depends_on(std::size_t rank) const {
  if (direction_ == Direction::send)
    return rank == peer_;
  const std::size_t source = comm_.channels().awaited_source(*this);
  if (source != Channels::any)
    return rank == source && comm_.channels().drained(rank);
  for (std::size_t q = 0; q < comm_.size(); ++q) // any other rank may still send
    if (q != comm_.rank() && !(comm_.is_gone(q) && comm_.channels().drained(q)))
      return false;
  return true;
}

std::vector<Need> Transfer::needs() const {
  std::vector<Need> all;
  for (std::size_t q = 0; q < comm_.size(); ++q)
    if (q == peer_ || (peer_ == Channels::any && q != comm_.rank()))
      all.push_back({q, true, 0});
  return all;
}

bool Transfer::crosses_hosts() const {
  return peer_ == Channels::any ? comm_.local_ranks().size() < comm_.size()
                                : comm_.is_remote(peer_);
}

bool Transfer::poll_fds(std::vector<pollfd> &into) const {
  comm_.channels().poll_fds(*this, into);
  return peer_ != Channels::any && comm_.is_remote(peer_) && !into.empty();
}

Channels::Channels(Comm &comm)
    : comm_(comm), capacity_(ring_capacity(comm.size())), inboxes_(comm.size()),
      outboxes_(comm.size()) {}

void Channels::submit(const std::shared_ptr<Transfer> &transfer) {
  std::lock_guard lock(mutex_);
  if (transfer->direction_ == Transfer::Direction::send)
    outboxes_[transfer->peer_].waiting.push_back(transfer.get());
  else
    posted_.push_back(transfer);
}

// For a transfer that failed. A message half received is read to its end and discarded, by
// the progress thread, since its sender waits for that; after a message half sent nothing else
// can be sent to that rank.
bool Channels::cancel(Transfer &transfer) {
  std::lock_guard lock(mutex_);
  if (transfer.complete_ && !transfer.size_mismatch_)
    return false;
  if (transfer.head_sent_)
    abandon(transfer);
  for (Outbox &box : outboxes_)
    std::erase(box.waiting, &transfer);
  std::erase_if(posted_, [&](const auto &p) { return p.get() == &transfer; });
  for (std::size_t q = 0; q < inboxes_.size(); ++q)
    if (Inbox &box = inboxes_[q]; box.into.get() == &transfer) {
      box.into = nullptr;
      box.unexpected.push_back({box.head, {}, true});
      if (!skip_lost(q))
        settle_later(box.abandoned);
    }
  return true;
}

void Channels::settle_later(bool &abandoned) {
  abandoned = true;
  abandoned_.fetch_add(1, std::memory_order_release);
  comm_.engine().progress->wake();
}

// What is in the ring stays there. If the message is incomplete, its receiver is notified;
// between hosts the progress thread still sends what is in the ring.
void Channels::abandon(Transfer &transfer) {
  Outbox &box = outboxes_[transfer.peer_];
  if (transfer.done_ < transfer.bytes_) {
    box.ring->truncated.store(1, std::memory_order_release);
    wake_sleepers(comm_.layout(), comm_.size());
  }
  if (!comm_.is_remote(transfer.peer_) || !box.send_stream->open() || box.abandoned ||
      !send_ring(transfer.peer_) || all_has_left(box))
    return;
  settle_later(box.abandoned);
}

Status Channels::advance(Transfer &transfer) {
  std::lock_guard lock(mutex_);
  const bool sends = transfer.direction_ == Transfer::Direction::send;
  return sends ? send(transfer) : receive(transfer);
}

// Whether everything that a rank has sent has been read.
bool Channels::drained(std::size_t source) {
  std::lock_guard lock(mutex_);
  if (comm_.is_remote(source))
    fill_ring(source);
  if (comm_.is_remote(source) && inboxes_[source].ended == Io::blocked)
    return !receive_stream(source).open();
  if (!open_inbox(source))
    return comm_.layout().block(source).outbox.load(std::memory_order_acquire) == 0;
  const Inbox &box = inboxes_[source];
  if (box.ended == Io::corrupt)
    return true; // nothing after it can be read
  const std::uint64_t there = box.ring->sent.load(std::memory_order_acquire) -
                              box.ring->taken.load(std::memory_order_relaxed);
  return there == 0 || (!box.open && there < sizeof(MessageHeader));
}

void Channels::close() {
  std::lock_guard lock(mutex_);
  if (outbox_ == 0)
    return;
  for (std::size_t q = 0; q < outboxes_.size(); ++q)
    if (outboxes_[q].send_stream) {
      if (outboxes_[q].abandoned)
        (void)send_ring(q);
      outboxes_[q].send_stream->send_close(0);
    }
  RankBlock &mine = comm_.layout().block(comm_.rank());
  const auto match_posted = unread_messages();
  if (!match_posted(comm_.host_peers())) {
    mine.outbox.store(0, std::memory_order_release);
    comm_.host_peers().drop(outbox_);
  } else {
    comm_.host_peers().drop_later(outbox_, match_posted);
  }
}

// A function that tells whether a local rank, alive and not closed, has messages to read;
// it may be called after this communicator is gone.
std::function<bool(const HostPeers &)> Channels::unread_messages() const {
  struct Receiver {
    const ByteRing *ring;
    const RankBlock *block;
    std::size_t world_rank;
  };
  std::vector<Receiver> receivers;
  for (std::size_t q = 0; q < comm_.size(); ++q)
    if (q != comm_.rank() && !comm_.is_remote(q))
      receivers.push_back({outboxes_[q].ring, &comm_.layout().block(q), comm_.world_rank(q)});
  return [receivers, memory = comm_.memory(),
          outbox = inboxes_[comm_.rank()].memory](const HostPeers &host_peers) {
    return std::any_of(receivers.begin(), receivers.end(), [&](const Receiver &to) {
      return to.ring->sent.load(std::memory_order_relaxed) !=
                 to.ring->taken.load(std::memory_order_acquire) &&
             to.block->closed.load(std::memory_order_acquire) == 0 &&
             !host_peers.dead(to.world_rank);
    });
  };
}

bool Channels::open_outbox() {
  RankBlock &mine = comm_.layout().block(comm_.rank());
  if (outboxes_[comm_.rank()].ring != nullptr)
    return true;
  const std::size_t stride = sizeof(ByteRing) + capacity_;
  const std::uint64_t id = outbox_ = comm_.host_peers().create(stride * comm_.size());
  const auto memory = comm_.host_peers().find(comm_.host_peers().rank(), id);
  for (std::size_t q = 0; q < comm_.size(); ++q)
    outboxes_[q].ring = reinterpret_cast<ByteRing *>(memory->data() + q * stride);
  inboxes_[comm_.rank()].memory = memory;
  inboxes_[comm_.rank()].ring = outboxes_[comm_.rank()].ring;
  mine.outbox.store(id, std::memory_order_release);
  return true;
}

bool Channels::open_inbox(std::size_t source) {
  Inbox &box = inboxes_[source];
  if (box.ring != nullptr)
    return true;
  if (comm_.is_remote(source)) {
    box.own.resize(sizeof(ByteRing) + capacity_ + line_size);
    const auto at = reinterpret_cast<std::uintptr_t>(box.own.data());
    box.ring = new (box.own.data() + (line_size - at % line_size) % line_size) ByteRing{};
    return true;
  }
  const std::uint64_t id =
      comm_.layout().block(source).outbox.load(std::memory_order_acquire);
  if (id == 0)
    return false;
  box.memory = comm_.host_peers().find(comm_.world_rank(source), id);
  if (!box.memory)
    return false; // its descriptor has not arrived
  const std::size_t stride = sizeof(ByteRing) + capacity_;
  box.ring = reinterpret_cast<ByteRing *>(box.memory->data() + comm_.rank() * stride);
  return true;
}

Status Channels::send(Transfer &transfer) {
  Outbox &box = outboxes_[transfer.peer_];
  if (transfer.complete_)
    return Status::done; // another thread has completed it
  const bool remote = comm_.is_remote(transfer.peer_);
  if (remote && box.ring != nullptr && !send_ring(transfer.peer_))
    return connection_lost(transfer, transfer.peer_);
  if (box.waiting.empty() || box.waiting.front() != &transfer)
    return Status::blocked;
  open_outbox();
  ByteRing *ring = box.ring;
  if (ring->truncated.load(std::memory_order_relaxed) != 0) {
    return failed(transfer, FailureKind::truncated, comm_.rank());
  }
  if (!put(transfer, ring))
    return Status::blocked;
  if (transfer.done_ < transfer.bytes_) {
    if (remote)
      (void)send_ring(transfer.peer_);
    return Status::blocked;
  }
  if (remote) {
    transfer.end_ = ring->sent.load(std::memory_order_relaxed);
    (void)send_ring(transfer.peer_);
    if (ring->taken.load(std::memory_order_relaxed) < transfer.end_)
      return Status::blocked;
  }
  box.waiting.pop_front();
  transfer.complete_ = true;
  return Status::done;
}

// Writes as much of a message into its ring as fits; false if not even its header does.
bool Channels::put(Transfer &transfer, ByteRing *ring) {
  std::byte *bytes = bytes_of(ring);
  std::uint64_t sent = ring->sent.load(std::memory_order_relaxed);
  const std::uint64_t before = sent;
  std::size_t room = capacity_ - (sent - ring->taken.load(std::memory_order_acquire));
  if (!transfer.head_sent_) {
    if (room < sizeof(MessageHeader))
      return false;
    const MessageHeader head{transfer.bytes_, transfer.tag_, transfer.type_};
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
    wake_sleepers(comm_.layout(), comm_.size());
  }
  return true;
}

} // namespace unisono
