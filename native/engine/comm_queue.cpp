// Queued work: collectives run one after another, messages side by side. The progress
// thread or a waiting thread advances it; it claims the collectives first, as a call on its
// caller's thread does.

#include "engine/comm.hpp"

#include <sched.h>

#include "engine/progress.hpp"

namespace unisono {

std::shared_ptr<Task> Comm::submit(std::shared_ptr<const Plan> plan, const void *input,
                                 void *output, std::int64_t timeout, std::uint32_t site,
                                 bool brief) {
  auto op = std::make_shared<Collective>(*this);
  op->queued = true;
  op->prepare(plan, input, output);
  op->timeout = timeout;
  record(*op, plan->note, now_ns());
  op->record->site = site; // before it is visible to other threads
  bool first = false, refused = false;
  {
    std::lock_guard lock(mutex_);
    if (!(refused = queue_closed_)) {
      queue_.push_back(op);
      first = queued_.fetch_add(1, std::memory_order_release) == 0;
    }
  }
  if (refused) {
    op->failure = closed_failure();
    op->finish(Task::broken);
    return op;
  }
  bool left = !(brief && first);
  if (!left)
    advance_queue(&left, op.get());
  if (left)
    engine_.progress->wake();
  return op;
}

std::shared_ptr<Task> Comm::submit(std::shared_ptr<Transfer> transfer) {
  transfer->queued = true;
  bool refused = false;
  {
    std::lock_guard lock(mutex_);
    if (!(refused = queue_closed_))
      transfers_.push_back(transfer);
  }
  if (!refused) {
    engine_.progress->wake();
  } else { // unless another thread has received it meanwhile
    transfer->failure = closed_failure();
    complete(*transfer, Status::failed);
  }
  return transfer;
}

// Of a call that was begun while another thread closed this: nobody would advance it.
Failure Comm::closed_failure() const {
  return {FailureKind::closed, std::uint32_t(rank_), std::uint32_t(rank_),
          std::uint32_t(seq.load() + 1)};
}

// Removes queued work without a waiter: its buffers may be released.
void Comm::cancel(const std::shared_ptr<Task> &op) {
  while (!claim())
    ::sched_yield();
  {
    std::lock_guard lock(mutex_);
    queued_.fetch_sub(std::uint32_t(std::erase(queue_, op)), std::memory_order_release);
  }
  op->recall();
  if (op->pending_now()) {
    op->release_buffers();
    op->finish(Task::broken);
  }
  zero_copy_.give_up(op->seq);
  release();
}

bool Comm::progress(bool *left) {
  bool more = false;
  const bool moved = advance_queue(&more);
  const bool sent = advance_transfers(&more);
  *left = more;
  return moved || sent;
}

// Advances as far as possible without waiting; failed if it cannot proceed.
Status Comm::attempt(Task &op) {
  const Status status = step(op);
  return status == Status::blocked ? check_blocked(op) : status;
}

// Only `only`, if that is not null.
bool Comm::advance_queue(bool *left, const Task *only) {
  bool moved = false;
  while (queued_.load(std::memory_order_acquire) != 0) {
    if (!claim()) {
      *left = true; // another thread advances it, and wakes the progress thread at the end
      return moved;
    }
    const std::shared_ptr<Task> op = next();
    if (!op) {
      release();
      return moved;
    }
    if (only != nullptr && op.get() != only) {
      release();
      *left = true;
      return moved;
    }
    if (op->record != nullptr && op->record->begun == 0 && op->record->id == op->record_id) {
      op->record->begun = now_ns();
      op->record->note.seq = seq + 1;
      op->record->state.store(Record::started, std::memory_order_relaxed);
    }
    const Status status = attempt(*op);
    if (status == Status::blocked) {
      release();
      *left = true;
      return moved;
    }
    complete(*op, status);
    {
      std::lock_guard lock(mutex_);
      if (!queue_.empty() && queue_.front() == op) {
        queue_.pop_front();
        queued_.fetch_sub(1, std::memory_order_release);
      }
    }
    release();
    wake_waiters();
    moved = true;
  }
  return moved;
}

bool Comm::advance_transfers(bool *left) {
  const std::unique_lock only(transferring_, std::try_to_lock);
  if (!only) {
    *left = true; // another thread advances them
    return false;
  }
  std::vector<std::shared_ptr<Task>> now;
  {
    std::lock_guard lock(mutex_);
    now = transfers_;
  }
  bool moved = false;
  for (auto &op : now) {
    if (!op->pending_now())
      continue; // another thread has completed it
    const Status status = attempt(*op);
    if (status == Status::blocked) {
      *left = true;
      continue;
    }
    complete(*op, status);
    {
      std::lock_guard lock(mutex_);
      std::erase(transfers_, op);
    }
    wake_waiters();
    moved = true;
  }
  if (channels_.settle_abandoned())
    *left = true;
  return moved;
}

// The collective at the head of the queue, or null.
std::shared_ptr<Task> Comm::next() {
  std::lock_guard lock(mutex_);
  return queue_.empty() ? nullptr : queue_.front();
}

// The ranks that queued work waits for. Collectives may be inspected only under the claim.
std::vector<std::size_t> Comm::missing(Task &op) {
  if (dynamic_cast<Transfer *>(&op) != nullptr)
    return blocking_ranks(op);
  for (int tries = 0; tries < 1000; ++tries) {
    if (!claim()) {
      ::sched_yield();
      continue;
    }
    const auto first = next(); // those behind it wait for the same ranks
    const auto late = first ? blocking_ranks(*first) : std::vector<std::size_t>{};
    release();
    return late;
  }
  return {};
}

bool Comm::poll_fds(std::vector<pollfd> &into) {
  if (send_streams_.empty() || !claim())
    return false;
  bool alone = false;
  {
    std::lock_guard lock(mutex_);
    alone = !queue_.empty() && queue_.front()->poll_fds(into);
    for (const auto &transfer : transfers_)
      alone = transfer->poll_fds(into) && alone;
  }
  channels_.abandoned_poll_fds(into);
  release();
  return alone;
}

} // namespace unisono
