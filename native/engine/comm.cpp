// Construction and closing of a communicator, and calls driven on their caller's thread.

#include "engine/comm.hpp"

#include <algorithm>
#include <stdexcept>

#include "engine/progress.hpp"
#include "net/io_threads.hpp"
#include "net/lifeline.hpp"

namespace unisono {

namespace {

// Rotates the ranks so that the list ends with `rank`.
std::vector<std::size_t> rotated(std::vector<std::size_t> ranks, std::size_t rank) {
  const auto at = std::find(ranks.begin(), ranks.end(), rank);
  if (at == ranks.end())
    throw std::invalid_argument("a rank must be on its own host");
  std::rotate(ranks.begin(), at + 1, ranks.end());
  return ranks;
}

} // namespace

Comm::Comm(Engine engine, std::vector<std::size_t> ranks, std::size_t rank,
           std::vector<std::size_t> local_ranks, std::shared_ptr<Memory> memory,
           std::size_t half, std::uint64_t id, std::uint64_t shared_id)
    : seen(ranks.size(), 0), engine_(std::move(engine)), ranks_(std::move(ranks)),
      rank_(rank), memory_(std::move(memory)),
      layout_(memory_->data(), ranks_.size(), half, local_ranks), id_(id),
      shared_id_(shared_id), local_ranks_(rotated(std::move(local_ranks), rank)),
      zero_copy_(engine_.host_peers, layout_, ranks_, local_ranks_, rank_, id),
      inline_(*this), channels_(*this) {
  if (local_ranks_.size() < ranks_.size())
    make_streams();
  engine_.progress->add(this);
}

// Makes the streams to and from the ranks of other hosts.
void Comm::make_streams() {
  remote_.assign(size(), true);
  for (const std::size_t q : local_ranks_)
    remote_[q] = false;
  send_streams_.resize(size());
  receive_streams_.resize(size());
  for (std::size_t q = 0; q < size(); ++q)
    if (remote_[q]) {
      send_streams_[q] = std::make_unique<SendStream>();
      receive_streams_[q] = std::make_unique<ReceiveStream>();
    }
  channels_.make_streams();
}

Comm::~Comm() {
  close();
  if (engine_.io_threads)
    engine_.io_threads->pass();
}

void Comm::close() {
  if (closed_.exchange(true))
    return;
  engine_.progress->remove(this);
  if (host_peers().forked())
    return;
  close_queue();
  channels_.close();
  // Only now: before that, a rank that waits for this one would take a call for lost that
  // another thread is about to complete.
  layout_.block(rank_).closed.store(1, std::memory_order_release);
  wake_sleepers(layout_, size());
  end_streams();
  if (!remote_.empty() && engine_.lifeline)
    announce_closing();
  wake_waiters();
}

// Where another thread does not stop using the streams, only the wires end.
void Comm::end_streams() {
  if (send_streams_.empty())
    return;
  const bool claimed = claim_to_close();
  for (auto &send_stream : send_streams_)
    if (send_stream && claimed)
      send_stream->send_close(layout_.control().abort.load(std::memory_order_acquire));
    else if (send_stream)
      send_stream->finish_sending();
  if (claimed)
    release();
}

// Ends all queued work. The collectives fail on all ranks from the first that this rank has
// not completed; ranks that are still in an earlier call go on.
void Comm::close_queue() {
  {
    std::lock_guard lock(mutex_);
    queue_closed_ = true; // nothing is queued from now on
  }
  const bool claimed = queued_.load(std::memory_order_acquire) != 0 && claim_to_close();
  {
    std::scoped_lock lock(transferring_, mutex_);
    Failure left{FailureKind::closed, std::uint32_t(rank_), std::uint32_t(rank_), 0};
    if (!queue_.empty()) {
      const std::uint64_t first = queue_.front()->seq; // 0: it has not begun
      left.seq = std::uint32_t(first != 0 ? first : seq.load() + claimed);
      abort(left);
      if (claimed)
        for (auto &op : queue_)
          op->recall();
      zero_copy_.give_up(first);
    }
    for (auto &op : queue_) {
      op->failure = left;
      op->finish(Task::broken);
    }
    queue_.clear();
    for (auto &op : transfers_) {
      op->failure = left;
      complete(*op, Status::failed); // nothing is received into its buffer any more
    }
    transfers_.clear();
  }
  if (claimed)
    release();
}

// Another thread may be advancing the queue: it sees that this is closed, and ends its call.
// It could be this very thread, in a signal handler: then it continues after this.
bool Comm::claim_to_close() {
  wake_waiters();
  for (const std::int64_t until = now_ns() + 1'000'000'000; now_ns() < until;) {
    if (claim())
      return true;
    ::sched_yield();
  }
  return false;
}

void Comm::record(Task &op, const Note &note, std::int64_t now) {
  op.record = &engine_.recorder->begin(note, id_, now);
  op.record_id = op.record->id;
}

// Advances a task; an exception, such as a lack of memory, is the task's failure.
Status Comm::step(Task &op) {
  try {
    return op.advance();
  } catch (const std::exception &) {
    const Failure out_of_resources{FailureKind::out_of_resources, std::uint32_t(rank_),
                                   std::uint32_t(rank_), std::uint32_t(op.seq)};
    op.failure = op.aborts_comm ? abort(out_of_resources) : out_of_resources;
    return Status::failed;
  }
}

Task::State Comm::drive(Task &op, WaitPolicy wait_policy,
                        const std::function<bool()> &interrupted) {
  Backoff backoff(wait_policy, layout_.control(), layout_.block(rank_).asleep,
                  oversubscription);
  Status status = Status::blocked;
  std::int64_t asked = 0;
  std::uint64_t moved = op.moved;
  while ((status = step(op)) == Status::blocked) {
    if (op.moved != moved) { // another wait has begun
      moved = op.moved;
      op.waiting_since = 0;
      backoff.reset();
    }
    const bool look = backoff.pause([&] { return (status = step(op)) != Status::blocked; },
                                    [&](std::int64_t nap) { sleep_until_ready(op, nap); });
    if (status != Status::blocked)
      break;
    if (!look)
      continue;
    if ((status = check_blocked(op)) != Status::blocked)
      break;
    const std::int64_t now = now_ns();
    if (asked == 0)
      asked = now;
    if (now - asked > 30'000'000) {
      asked = now;
      if (interrupted && interrupted()) {
        const Failure stopped{FailureKind::interrupted, std::uint32_t(rank_),
                              std::uint32_t(rank_), std::uint32_t(op.seq)};
        op.failure = op.aborts_comm ? abort(stopped) : stopped;
        status = Status::failed;
        break;
      }
    }
  }
  complete(op, status);
  return Task::State(op.state.load(std::memory_order_relaxed));
}

void Comm::sleep_until_ready(const Task &op, std::int64_t nap) {
  std::vector<pollfd> sockets;
  const bool alone = !send_streams_.empty() && op.poll_fds(sockets);
  if (sockets.empty()) {
    futex_sleep(layout_.block(rank_).asleep, 1, nap);
    return;
  }
  // Local ranks cannot wake this thread while it polls sockets.
  nap = alone ? nap : std::min<std::int64_t>(nap, 100'000);
  const timespec limit{nap / 1'000'000'000, nap % 1'000'000'000};
  ::ppoll(sockets.data(), sockets.size(), &limit, nullptr);
}

// Threads of this process that wait for queued work sleep on the rank's futex.
void Comm::wake_waiters() {
  auto &asleep = layout_.block(rank_).asleep;
  if (asleep.exchange(0, std::memory_order_relaxed) != 0)
    futex_wake(asleep);
}

bool Comm::try_drive(Task &op, std::uint32_t spins) {
  for (std::uint32_t i = 0; i <= spins; ++i) {
    const Status status = step(op);
    if (status != Status::blocked) {
      complete(op, status);
      return true;
    }
    relax();
  }
  return false;
}

void Comm::complete(Task &op, Status status) {
  if (op.aborts_comm && !remote_.empty()) {
    layout_.block(rank_).waits_for.store(0, std::memory_order_relaxed);
    announce_wait(op, 0);
  }
  bool failed = status != Status::done;
  if (failed) {
    if (op.failure.kind == FailureKind::mismatch)
      op.failure = abort(op.failure);
    op.recall();
    if (op.aborts_comm)
      zero_copy_.give_up(op.seq);
    auto *transfer = dynamic_cast<Transfer *>(&op);
    failed = transfer == nullptr || channels_.cancel(*transfer);
  }
  if (!failed) // counted before the completion is visible
    sent_.fetch_add(op.sends, std::memory_order_relaxed);
  if (!op.pending_now())
    return; // another thread has completed it
  op.release_buffers();
  const auto how = failed ? Task::broken : Task::succeeded;
  op.close_record(how);
  if (trace().on())
    trace_call(op);
  op.publish(how);
}

// Copies its record, which is soon overwritten.
void Comm::trace_call(const Task &op) {
  const Record *record = op.record;
  if (record == nullptr || record->id != op.record_id)
    return;
  const auto *transfer = dynamic_cast<const Transfer *>(&op);
  const bool found = transfer != nullptr && transfer->source() != Channels::any;
  const std::int32_t peer = found ? std::int32_t(transfer->source()) : record->peer;
  trace().called() = {record->note, record->created, record->begun, record->ended,
                      op.sends, std::uint32_t(id_), peer, record->tag, record->site,
                      record->state.load(std::memory_order_relaxed), op.queued, -1, 0};
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
