#include "comm.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "failpoint.hpp"
#include "lifeline.hpp"
#include "progress.hpp"

namespace unisono {

namespace {

// Those after `rank` first, then from the beginning to it.
std::vector<std::size_t> turned(std::vector<std::size_t> ranks, std::size_t rank) {
  const auto at = std::find(ranks.begin(), ranks.end(), rank);
  if (at == ranks.end())
    throw std::invalid_argument("a rank must be on its own host");
  std::rotate(ranks.begin(), at + 1, ranks.end());
  return ranks;
}

} // namespace

Comm::Comm(Engine engine, std::vector<std::size_t> ranks, std::size_t rank,
           std::vector<std::size_t> here, std::shared_ptr<Memory> memory, std::size_t half,
           std::uint64_t id, std::uint64_t agreed)
    : seen(ranks.size(), 0), engine_(std::move(engine)), ranks_(std::move(ranks)),
      rank_(rank), memory_(std::move(memory)),
      layout_(memory_->data(), ranks_.size(), half), id_(id), agreed_(agreed),
      here_(turned(std::move(here), rank)),
      lending_(engine_.mesh, layout_, ranks_, here_, rank_, id), inline_(*this),
      post_(*this) {
  if (here_.size() < ranks_.size())
    part();
  engine_.progress->add(this);
}

// Makes room for the streams to and from the ranks of other hosts.
void Comm::part() {
  far_.assign(size(), true);
  for (const std::size_t q : here_)
    far_[q] = false;
  outlets_.resize(size());
  inlets_.resize(size());
  for (std::size_t q = 0; q < size(); ++q)
    if (far_[q]) {
      outlets_[q] = std::make_unique<Outlet>();
      inlets_[q] = std::make_unique<Inlet>();
    }
  post_.part();
}

Comm::~Comm() { close(); }

void Comm::close() {
  if (closed_.exchange(true))
    return;
  engine_.progress->remove(this);
  if (mesh().forked())
    return;
  post_.close();
  layout_.block(rank_).left.store(1, std::memory_order_release);
  ring(layout_, size());
  std::scoped_lock lock(transferring_, mutex_);
  if (!queue_.empty()) {
    condemn({Trouble::left, std::uint32_t(rank_), std::uint32_t(rank_), 0});
    lending_.hands_off();
  }
  for (auto &op : queue_) {
    op->verdict = {Trouble::left, std::uint32_t(rank_), std::uint32_t(rank_), 0};
    op->finish(Task::broken);
  }
  queue_.clear();
  for (auto &op : transfers_) {
    op->verdict = {Trouble::left, std::uint32_t(rank_), std::uint32_t(rank_), 0};
    op->finish(Task::broken);
  }
  transfers_.clear();
  for (auto &outlet : outlets_)
    if (outlet)
      outlet->leave(layout_.control().abort.load(std::memory_order_acquire));
  if (!far_.empty() && engine_.lifeline)
    say_goodbye();
  wake_waiters();
}

void Comm::record(Task &op, const Note &note, std::int64_t now) {
  op.record = &engine_.recorder->begin(note, id_, now);
  op.record_id = op.record->id;
}

// Advances a task; what it could not get is its failure, not this process's end.
Status Comm::step(Task &op) {
  try {
    return op.advance();
  } catch (const std::exception &) {
    const Verdict starved{Trouble::starved, std::uint32_t(rank_), std::uint32_t(rank_),
                          std::uint32_t(op.seq)};
    op.verdict = op.breaks_all ? condemn(starved) : starved;
    return Status::failed;
  }
}

// Whom work in flight waits for; only whoever advances the collectives may ask them.
std::vector<std::size_t> Comm::missing(Task &op) {
  if (dynamic_cast<Transfer *>(&op) != nullptr)
    return culprits(op);
  for (int tries = 0; tries < 1000; ++tries) {
    bool idle = false;
    if (!busy_.compare_exchange_strong(idle, true, std::memory_order_acquire)) {
      ::sched_yield();
      continue;
    }
    std::shared_ptr<Task> first; // those behind it wait for whom it waits for
    {
      std::lock_guard lock(mutex_);
      if (!queue_.empty())
        first = queue_.front();
    }
    const auto late = first ? culprits(*first) : std::vector<std::size_t>{};
    busy_.store(false, std::memory_order_release);
    return late;
  }
  return {};
}

Task::State Comm::drive(Task &op, Patience patience, const std::function<bool()> &interrupted) {
  Backoff backoff(patience, layout_.control(), layout_.block(rank_).asleep, crowd);
  Status status = Status::blocked;
  std::int64_t asked = 0;
  std::uint64_t moved = op.moved;
  while ((status = step(op)) == Status::blocked) {
    if (op.moved != moved) { // this is another wait
      moved = op.moved;
      op.waiting_since = 0;
      backoff.reset();
    }
    const bool look = backoff.pause([&] { return (status = step(op)) != Status::blocked; },
                                    [&](std::int64_t nap) { doze(op, nap); });
    if (status != Status::blocked)
      break;
    if (!look)
      continue;
    if (doomed(op)) {
      status = Status::failed;
      break;
    }
    const std::int64_t now = now_ns();
    if (asked == 0)
      asked = now;
    if (now - asked > 30'000'000) {
      asked = now;
      if (interrupted && interrupted()) {
        const Verdict stopped{Trouble::interrupted, std::uint32_t(rank_),
                              std::uint32_t(rank_), std::uint32_t(op.seq)};
        op.verdict = op.breaks_all ? condemn(stopped) : stopped;
        status = Status::failed;
        break;
      }
    }
  }
  settle(op, status);
  return Task::State(op.state.load(std::memory_order_relaxed));
}

void Comm::doze(const Task &op, std::int64_t nap) {
  std::vector<pollfd> sockets;
  const bool alone = !outlets_.empty() && op.interests(sockets);
  if (sockets.empty()) {
    futex_sleep(layout_.block(rank_).asleep, 1, nap);
    return;
  }
  // Those who share our memory cannot wake us here.
  nap = alone ? nap : std::min<std::int64_t>(nap, 100'000);
  const timespec limit{nap / 1'000'000'000, nap % 1'000'000'000};
  ::ppoll(sockets.data(), sockets.size(), &limit, nullptr);
}

bool Comm::interests(std::vector<pollfd> &into) {
  if (outlets_.empty())
    return false;
  bool idle = false;
  if (!busy_.compare_exchange_strong(idle, true, std::memory_order_acquire))
    return false;
  bool alone = false;
  {
    std::lock_guard lock(mutex_);
    alone = !queue_.empty() && queue_.front()->interests(into);
    for (const auto &transfer : transfers_)
      alone = transfer->interests(into) && alone;
  }
  busy_.store(false, std::memory_order_release);
  return alone;
}

// Threads of this process that wait for work in flight sleep where the rank does.
void Comm::wake_waiters() {
  auto &asleep = layout_.block(rank_).asleep;
  if (asleep.exchange(0, std::memory_order_relaxed) != 0)
    futex_wake(asleep);
}

bool Comm::try_drive(Task &op, std::uint32_t spins) {
  for (std::uint32_t i = 0; i <= spins; ++i) {
    const Status status = step(op);
    if (status != Status::blocked) {
      settle(op, status);
      return true;
    }
    relax();
  }
  return false;
}

void Comm::settle(Task &op, Status status) {
  if (op.breaks_all && !far_.empty()) {
    layout_.block(rank_).waits_for.store(0, std::memory_order_relaxed);
    tell_waiting(op, 0);
  }
  bool failed = status != Status::done;
  if (failed) {
    if (op.verdict.trouble == Trouble::mismatch)
      op.verdict = condemn(op.verdict);
    if (op.breaks_all)
      lending_.hands_off();
    auto *transfer = dynamic_cast<Transfer *>(&op);
    failed = transfer == nullptr || post_.withdraw(*transfer);
  }
  if (!failed) // counted before anybody can see that it is done
    sent_.fetch_add(op.sends, std::memory_order_relaxed);
  op.finish(failed ? Task::broken : Task::succeeded);
  if (trace().on())
    trace_call(op);
}

// A copy of its record, which is soon overwritten.
void Comm::trace_call(const Task &op) {
  const Record *record = op.record;
  if (record == nullptr || record->id != op.record_id)
    return;
  const auto *transfer = dynamic_cast<const Transfer *>(&op);
  const bool found = transfer != nullptr && transfer->source() != Post::any;
  const std::int32_t peer = found ? std::int32_t(transfer->source()) : record->peer;
  trace().called() = {record->note, record->created, record->begun, record->ended,
                      op.sends, std::uint32_t(id_), peer, record->tag, record->site,
                      record->state.load(std::memory_order_relaxed), op.queued, {}};
}

Collective *Comm::begin_inline(const Plan &plan, const void *input, void *output,
                               std::int64_t timeout) {
  if (queued_.load(std::memory_order_acquire) != 0)
    return nullptr;
  bool idle = false;
  if (!busy_.compare_exchange_strong(idle, true, std::memory_order_acquire))
    return nullptr;
  if (queued_.load(std::memory_order_acquire) != 0) {
    busy_.store(false, std::memory_order_release);
    return nullptr;
  }
  inline_.prepare(plan, input, output);
  inline_.timeout = timeout;
  record(inline_, plan.note, now_ns());
  inline_.record->note.seq = seq + 1;
  inline_.record->begun = inline_.record->created;
  inline_.record->state.store(Record::started, std::memory_order_relaxed);
  return &inline_;
}

void Comm::end_inline() {
  busy_.store(false, std::memory_order_release);
  if (queued_.load(std::memory_order_acquire) != 0)
    engine_.progress->wake();
}

std::shared_ptr<Task> Comm::submit(std::shared_ptr<const Plan> plan, const void *input,
                                 void *output, std::int64_t timeout, std::uint32_t site) {
  auto op = std::make_shared<Collective>(*this);
  op->queued = true;
  op->prepare(*plan, input, output, plan);
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
  bool idle = false;
  while (!busy_.compare_exchange_weak(idle, true, std::memory_order_acquire)) {
    idle = false;
    ::sched_yield();
  }
  {
    std::lock_guard lock(mutex_);
    queued_.fetch_sub(std::uint32_t(std::erase(queue_, op)), std::memory_order_release);
  }
  if (op->pending_now())
    op->finish(Task::broken);
  lending_.hands_off();
  busy_.store(false, std::memory_order_release);
}

bool Comm::progress(bool *left) {
  bool more = false;
  const bool moved = advance_queue(&more);
  const bool sent = advance_transfers(&more);
  *left = more;
  return moved || sent;
}

bool Comm::advance_queue(bool *left) {
  bool moved = false;
  while (queued_.load(std::memory_order_acquire) != 0) {
    bool idle = false;
    if (!busy_.compare_exchange_strong(idle, true, std::memory_order_acquire)) {
      *left = true; // somebody is at it, and wakes us when done
      return moved;
    }
    std::shared_ptr<Task> op;
    {
      std::lock_guard lock(mutex_);
      if (!queue_.empty())
        op = queue_.front();
    }
    if (!op) {
      busy_.store(false, std::memory_order_release);
      return moved;
    }
    if (op->record != nullptr && op->record->begun == 0 && op->record->id == op->record_id) {
      op->record->begun = now_ns();
      op->record->note.seq = seq + 1;
      op->record->state.store(Record::started, std::memory_order_relaxed);
    }
    Status status = step(*op);
    if (status == Status::blocked && doomed(*op))
      status = Status::failed;
    if (status == Status::blocked) {
      busy_.store(false, std::memory_order_release);
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
    busy_.store(false, std::memory_order_release);
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
    Status status = step(*op);
    if (status == Status::blocked && doomed(*op))
      status = Status::failed;
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
  return moved;
}

} // namespace unisono
