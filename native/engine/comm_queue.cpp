// Work that is queued: collectives one after the other, messages side by side. Whoever has
// time advances it, the progress thread or one who waits; for the collectives it claims the
// communicator first, as a call on its caller's thread does.

#include "engine/comm.hpp"

#include <sched.h>

#include "engine/progress.hpp"

namespace unisono {

std::shared_ptr<Task> Comm::submit(std::shared_ptr<const Plan> plan, const void *input,
                                 void *output, std::int64_t timeout, std::uint32_t site) {
  auto op = std::make_shared<Collective>(*this);
  op->queued = true;
  op->prepare(plan, input, output);
  op->timeout = timeout;
  record(*op, plan->note, now_ns());
  op->record->site = site; // before anybody can see it
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(op);
    queued_.fetch_add(1, std::memory_order_release);
  }
  engine_.progress->wake();
  return op;
}

std::shared_ptr<Task> Comm::submit(std::shared_ptr<Transfer> transfer) {
  transfer->queued = true;
  {
    std::lock_guard lock(mutex_);
    transfers_.push_back(transfer);
  }
  engine_.progress->wake();
  return transfer;
}

// Takes back what was queued and will not be waited for: its buffers may be gone.
void Comm::cancel(const std::shared_ptr<Task> &op) {
  while (!claim())
    ::sched_yield();
  {
    std::lock_guard lock(mutex_);
    queued_.fetch_sub(std::uint32_t(std::erase(queue_, op)), std::memory_order_release);
  }
  if (op->pending_now())
    op->finish(Task::broken);
  lending_.hands_off();
  release();
}

bool Comm::progress(bool *left) {
  bool more = false;
  const bool moved = advance_queue(&more);
  const bool sent = advance_transfers(&more);
  *left = more;
  return moved || sent;
}

// As far as it goes without waiting; failed also if it cannot go on.
Status Comm::attempt(Task &op) {
  const Status status = step(op);
  return status == Status::blocked ? judge(op) : status;
}

bool Comm::advance_queue(bool *left) {
  bool moved = false;
  while (queued_.load(std::memory_order_acquire) != 0) {
    if (!claim()) {
      *left = true; // somebody is at it, and wakes us when done
      return moved;
    }
    const std::shared_ptr<Task> op = next();
    if (!op) {
      release();
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
    settle(*op, status);
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
    *left = true; // somebody is at it
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
      continue; // another thread was faster
    const Status status = attempt(*op);
    if (status == Status::blocked) {
      *left = true;
      continue;
    }
    settle(*op, status);
    {
      std::lock_guard lock(mutex_);
      std::erase(transfers_, op);
    }
    wake_waiters();
    moved = true;
  }
  if (post_.ship_abandoned())
    *left = true;
  return moved;
}

// The collective whose turn it is, or null.
std::shared_ptr<Task> Comm::next() {
  std::lock_guard lock(mutex_);
  return queue_.empty() ? nullptr : queue_.front();
}

// Whom work in flight waits for; only whoever advances the collectives may ask them.
std::vector<std::size_t> Comm::missing(Task &op) {
  if (dynamic_cast<Transfer *>(&op) != nullptr)
    return culprits(op);
  for (int tries = 0; tries < 1000; ++tries) {
    if (!claim()) {
      ::sched_yield();
      continue;
    }
    const auto first = next(); // those behind it wait for whom it waits for
    const auto late = first ? culprits(*first) : std::vector<std::size_t>{};
    release();
    return late;
  }
  return {};
}

bool Comm::interests(std::vector<pollfd> &into) {
  if (outlets_.empty() || !claim())
    return false;
  bool alone = false;
  {
    std::lock_guard lock(mutex_);
    alone = !queue_.empty() && queue_.front()->interests(into);
    for (const auto &transfer : transfers_)
      alone = transfer->interests(into) && alone;
  }
  post_.abandoned_interests(into);
  release();
  return alone;
}

} // namespace unisono
