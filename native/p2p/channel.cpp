// The sending end of the rings, and what both ends have in common: a transfer enters, is
// advanced by whoever has time, and is withdrawn if it fails.

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

bool Transfer::crosses_hosts() const {
  return peer_ == Post::any ? comm_.here().size() < comm_.size() : comm_.far(peer_);
}

bool Transfer::interests(std::vector<pollfd> &into) const {
  comm_.post().interests(*this, into);
  return peer_ != Post::any && comm_.far(peer_) && !into.empty();
}

Post::Post(Comm &comm)
    : comm_(comm), capacity_(ring_capacity(comm.size())), inboxes_(comm.size()),
      outboxes_(comm.size()) {}

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
  if (transfer.head_sent_)
    give_up(transfer);
  for (Outbox &box : outboxes_)
    std::erase(box.waiting, &transfer);
  std::erase_if(posted_, [&](const auto &p) { return p.get() == &transfer; });
  for (Inbox &box : inboxes_)
    if (box.into.get() == &transfer) {
      box.into = nullptr;
      box.aside.push_back({box.head, {}, true});
    }
  return true;
}

// What is in the ring stays there. If that is not all, whoever reads it is told so; between
// hosts it must still be sent there, which is done by the progress thread.
void Post::give_up(Transfer &transfer) {
  Outbox &box = outboxes_[transfer.peer_];
  if (transfer.done_ < transfer.bytes_) {
    box.ring->cut.store(1, std::memory_order_release);
    ring(comm_.layout(), comm_.size());
  }
  if (!comm_.far(transfer.peer_) || !box.outlet->open() || box.abandoned ||
      !ship(transfer.peer_) || all_has_left(box))
    return;
  box.abandoned = true;
  abandoned_.fetch_add(1, std::memory_order_release);
  comm_.engine().progress->wake();
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
  const Inbox &box = inboxes_[source];
  if (box.ended == Io::corrupt)
    return true; // nothing of what is there can be read
  const std::uint64_t there = box.ring->sent.load(std::memory_order_acquire) -
                              box.ring->taken.load(std::memory_order_relaxed);
  return there == 0 || (!box.open && there < sizeof(MessageHead));
}

void Post::close() {
  std::lock_guard lock(mutex_);
  if (outbox_ == 0)
    return;
  for (std::size_t q = 0; q < outboxes_.size(); ++q)
    if (outboxes_[q].outlet) {
      if (outboxes_[q].abandoned)
        (void)ship(q);
      outboxes_[q].outlet->leave(0);
    }
  RankBlock &mine = comm_.layout().block(comm_.rank());
  const auto wanted = untaken();
  if (!wanted(comm_.mesh())) {
    mine.outbox.store(0, std::memory_order_release);
    comm_.mesh().drop(outbox_);
  } else {
    comm_.mesh().drop_later(outbox_, wanted);
  }
}

// Whether somebody of this host, who lives and has not left, has not taken all that it was
// sent; to be asked when this communicator is gone.
std::function<bool(const Mesh &)> Post::untaken() const {
  struct Receiver {
    const Ring *ring;
    const RankBlock *block;
    std::size_t world_rank;
  };
  std::vector<Receiver> receivers;
  for (std::size_t q = 0; q < comm_.size(); ++q)
    if (q != comm_.rank() && !comm_.far(q))
      receivers.push_back({outboxes_[q].ring, &comm_.layout().block(q), comm_.world_rank(q)});
  return [receivers, memory = comm_.memory(),
          outbox = inboxes_[comm_.rank()].memory](const Mesh &mesh) {
    return std::any_of(receivers.begin(), receivers.end(), [&](const Receiver &to) {
      return to.ring->sent.load(std::memory_order_relaxed) !=
                 to.ring->taken.load(std::memory_order_acquire) &&
             to.block->left.load(std::memory_order_acquire) == 0 && !mesh.dead(to.world_rank);
    });
  };
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
  if (!put(transfer, ring))
    return Status::blocked;
  if (transfer.done_ < transfer.bytes_) {
    if (far)
      (void)ship(transfer.peer_);
    return Status::blocked;
  }
  if (far) {
    transfer.end_ = ring->sent.load(std::memory_order_relaxed);
    (void)ship(transfer.peer_);
    if (ring->taken.load(std::memory_order_relaxed) < transfer.end_)
      return Status::blocked;
  }
  box.waiting.pop_front();
  transfer.complete_ = true;
  return Status::done;
}

// Puts as much of a message into its ring as there is room for; false if not even its head
// has gone.
bool Post::put(Transfer &transfer, Ring *ring) {
  std::byte *bytes = bytes_of(ring);
  std::uint64_t sent = ring->sent.load(std::memory_order_relaxed);
  const std::uint64_t before = sent;
  std::size_t room = capacity_ - (sent - ring->taken.load(std::memory_order_acquire));
  if (!transfer.head_sent_) {
    if (room < sizeof(MessageHead))
      return false;
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
  return true;
}

} // namespace unisono
