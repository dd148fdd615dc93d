// How a communicator is made and ended, and how a call is driven on its caller's thread.

#include "engine/comm.hpp"

#include <algorithm>
#include <stdexcept>

#include "engine/progress.hpp"
#include "net/lifeline.hpp"

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
      layout_(memory_->data(), ranks_.size(), half, here), id_(id), agreed_(agreed),
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
  const Verdict left{Trouble::left, std::uint32_t(rank_), std::uint32_t(rank_), 0};
  if (!queue_.empty()) {
    condemn(left);
    lending_.hands_off();
  }
  const auto end = [&](auto &tasks) {
    for (auto &op : tasks) {
      op->verdict = left;
      op->finish(Task::broken);
    }
    tasks.clear();
  };
  end(queue_);
  end(transfers_);
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
    if ((status = judge(op)) != Status::blocked)
      break;
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
  if (!op.pending_now())
    return; // another thread was faster
  const auto how = failed ? Task::broken : Task::succeeded;
  op.close_record(how);
  if (trace().on())
    trace_call(op);
  op.publish(how);
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

Collective *Comm::begin_inline(std::shared_ptr<const Plan> plan, const void *input,
                               void *output, std::int64_t timeout) {
  if (queued_.load(std::memory_order_acquire) != 0)
    return nullptr;
  if (!claim())
    return nullptr;
  if (queued_.load(std::memory_order_acquire) != 0) {
    release();
    return nullptr;
  }
  record(inline_, plan->note, now_ns());
  inline_.prepare(std::move(plan), input, output);
  inline_.timeout = timeout;
  inline_.record->note.seq = seq + 1;
  inline_.record->begun = inline_.record->created;
  inline_.record->state.store(Record::started, std::memory_order_relaxed);
  return &inline_;
}

void Comm::end_inline() {
  release();
  if (queued_.load(std::memory_order_acquire) != 0)
    engine_.progress->wake();
}

} // namespace unisono
