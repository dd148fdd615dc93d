#include "comm.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

// A note that others may read while it is written: they look at its number before and
// after. Several may write it, but only the same.
void put(Note &to, const Note &note) {
  std::atomic_ref(to.seq).store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(reinterpret_cast<std::byte *>(&to) + sizeof to.seq,
              reinterpret_cast<const std::byte *>(&note) + sizeof note.seq,
              sizeof note - sizeof note.seq);
  std::atomic_ref(to.seq).store(note.seq, std::memory_order_release);
}

std::uint64_t get_seq(const Note &note) {
  std::atomic_thread_fence(std::memory_order_acquire);
  const auto seq =
      std::atomic_ref(const_cast<Note &>(note).seq).load(std::memory_order_acquire);
  return seq;
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

// Tells other hosts that this rank has left, and why if it is because of a verdict: who
// found that may have told it to the hub, and the hub be leaving before it has heard.
void Comm::say_goodbye() {
  const Verdict why = verdict();
  if (why.trouble == Trouble::mismatch)
    for (const std::size_t q : {std::size_t(why.culprit), std::size_t(why.reporter)})
      if (const Note &note = layout_.block(q).differing; std::uint32_t(note.seq) == why.seq)
        (void)engine_.lifeline->tell_called(agreed_, world_rank(q), note);
  if (why.trouble != Trouble::none)
    (void)engine_.lifeline->tell_verdict(agreed_, why.word());
  (void)engine_.lifeline->tell_closed(agreed_);
}

std::size_t Comm::dead() const {
  std::size_t q = 0;
  while (q < size() && !mesh().dead(world_rank(q)))
    ++q;
  return q;
}

void Comm::record(Task &op, const Note &note, std::int64_t now) {
  op.record = &engine_.recorder->begin(note, id_, now);
  op.record_id = op.record->id;
}

// Shows all what the two ranks had called whose calls differ, as far as it is known here.
void Comm::accuse(const Verdict &verdict) {
  for (const std::size_t q : {std::size_t(verdict.culprit), rank_}) {
    Note note = layout_.block(q).notes[verdict.seq & 1];
    if (far(q) && std::uint32_t(note.seq) != verdict.seq)
      note = inlets_[q]->note();
    if (std::uint32_t(note.seq) != verdict.seq)
      continue; // it will answer
    layout_.block(q).differing = note;
    if (!far_.empty() && engine_.lifeline)
      (void)engine_.lifeline->tell_called(agreed_, world_rank(q), note);
  }
}

Verdict Comm::condemn(Verdict verdict) {
  std::uint64_t found = 0;
  if (verdict.trouble == Trouble::mismatch && verdict.reporter == rank_ &&
      this->verdict().trouble == Trouble::none)
    accuse(verdict);
  Word &abort = layout_.control().abort;
  if (abort.compare_exchange_strong(found, verdict.word(), std::memory_order_acq_rel)) {
    found = verdict.word();
    if (!far_.empty() && engine_.lifeline)
      (void)engine_.lifeline->tell_verdict(agreed_, found);
  }
  ring(layout_, size());
  return Verdict::of(found);
}

void Comm::hear(const Event &event) {
  const auto at = std::find(ranks_.begin(), ranks_.end(), event.rank);
  if (at == ranks_.end())
    return;
  const auto rank = std::size_t(at - ranks_.begin());
  RankBlock &block = layout_.block(rank);
  std::uint64_t none = 0;
  switch (event.kind) {
  case Event::Kind::called:
    std::memcpy(&block.differing, event.note.data(), sizeof block.differing);
    break;
  case Event::Kind::verdict:
    layout_.control().abort.compare_exchange_strong(none, event.word,
                                                    std::memory_order_acq_rel);
    answer(Verdict::of(event.word));
    break;
  case Event::Kind::waits:
    if (far(rank)) {
      Note note;
      std::memcpy(&note, event.note.data(), sizeof note);
      put(layout_.block(rank).notes[note.seq & 1], note);
      block.needs.store(~std::uint64_t(0), std::memory_order_relaxed);
      block.waits_for.store(event.word, std::memory_order_relaxed);
    }
    break;
  case Event::Kind::closed:
    if (far(rank))
      block.left.compare_exchange_strong(none, std::uint64_t(now_ns()),
                                         std::memory_order_acq_rel);
    break;
  default:
    break;
  }
  ring(layout_, size());
}

// Whoever found our call to differ may not know what it was.
void Comm::answer(const Verdict &verdict) {
  const Note &note = layout_.block(rank_).notes[verdict.seq & 1];
  if (verdict.trouble == Trouble::mismatch && verdict.culprit == rank_ &&
      std::uint32_t(note.seq) == verdict.seq && engine_.lifeline)
    (void)engine_.lifeline->tell_called(agreed_, world_rank(rank_), note);
}

// Whether a rank of another host has said that it waits in this very call, but calls it by
// another name.
bool Comm::calls_otherwise(std::size_t rank, std::uint64_t seq) const {
  const Note &theirs = layout_.block(rank).notes[seq & 1];
  const Note &mine = layout_.block(rank_).notes[seq & 1];
  return far(rank) && get_seq(theirs) == seq && mine.seq == seq &&
         std::memcmp(&theirs, &mine, sizeof mine) != 0 && get_seq(theirs) == seq;
}

// Whether `op` can get nothing more from a rank that has closed its end. One of another
// host may have sent what is still on its way: if there is a stream, that tells its end,
// and if there is none it may be about to be attached.
bool Comm::has_left(std::size_t rank, const Task &op) const {
  const std::uint64_t left = layout_.block(rank).left.load(std::memory_order_acquire);
  if (left == 0 || !far(rank))
    return left != 0;
  return !(op.breaks_all && inlets_[rank]->open()) &&
         now_ns() - std::int64_t(left) > word_of_death;
}

bool Comm::doomed(Task &op) {
  const auto fails = [&](Verdict verdict, bool for_all) {
    op.verdict = for_all ? condemn(verdict) : verdict;
    return true;
  };
  const Verdict broken = verdict();
  if (broken.trouble != Trouble::none)
    return fails(broken, false);
  const auto seq32 = std::uint32_t(op.seq);
  const auto me = std::uint32_t(rank_);
  if (mesh().dead(world_rank(rank_))) // so the others say, who heard nothing of it for long
    return fails({Trouble::peer_lost, me, me, seq32}, op.breaks_all);
  if (closed()) // by another thread
    return fails({Trouble::left, me, me, seq32}, op.breaks_all);
  if (mesh().starved())
    return fails({Trouble::starved, me, me, seq32}, op.breaks_all);
  for (std::size_t q = 0; q < size(); ++q) {
    if (q == rank_)
      continue;
    const bool dead = mesh().dead(world_rank(q)), left = has_left(q, op);
    if (op.breaks_all && calls_otherwise(q, op.seq))
      return fails({Trouble::mismatch, std::uint32_t(q), me, seq32}, true);
    // Across hosts nobody sees who else is held up by a death, and if it is the hub's nobody
    // will be told: so it ends the calls of all. Not the death of one who had closed its end
    // before, having done its part.
    const bool ends_all = dead && op.breaks_all && !far_.empty() &&
                          layout_.block(q).left.load(std::memory_order_acquire) == 0;
    if ((dead || left) && (ends_all || op.hindered_by(q)))
      return fails({left ? Trouble::left : Trouble::peer_lost, std::uint32_t(q), me, seq32},
                   op.breaks_all);
  }
  if (op.breaks_all) {
    const auto open = op.needs();
    RankBlock &mine = layout_.block(rank_);
    mine.needs.store(open.empty() ? 0 : open[0].word, std::memory_order_relaxed);
    mine.waits_for.store(open.empty() ? 0
                                      : (open[0].rank + 1) | std::uint64_t(open[0].arrival) << 32,
                         std::memory_order_relaxed);
  }
  const std::int64_t now = now_ns();
  if (op.waiting_since == 0)
    op.waiting_since = now;
  const std::int64_t waited = now - op.waiting_since;
  tell_waiting(op, waited);
  if (op.timeout > 0 && waited >= op.timeout) {
    const auto late = op.missed = culprits(op);
    return fails({Trouble::timeout, std::uint32_t(late.empty() ? rank_ : late[0]), me, seq32},
                 op.breaks_all);
  }
  if (!op.warned && late_after > 0 && waited >= late_after) {
    op.warned = true;
    warn(op, waited);
  }
  return false;
}

// Tells other hosts whom this rank has been waiting for, so that they do not take it for
// the one that is late; in time, before anybody loses patience.
void Comm::tell_waiting(Task &op, std::int64_t waited) {
  if (far_.empty() || !op.breaks_all || !engine_.lifeline)
    return;
  std::int64_t patience = late_after > 0 ? late_after : op.timeout;
  if (op.timeout > 0)
    patience = std::min(patience, op.timeout);
  const bool long_enough = patience > 0 && waited >= patience / 4;
  const std::uint64_t word =
      long_enough ? layout_.block(rank_).waits_for.load(std::memory_order_relaxed) : 0;
  if (word == op.told_waiting)
    return;
  op.told_waiting = word;
  (void)engine_.lifeline->tell_waits(agreed_, word, layout_.block(rank_).notes[op.seq & 1]);
}

// Follows who waits for whom to one that could go on, but does not.
std::size_t Comm::culprit(std::size_t rank) const {
  for (std::size_t steps = 0; steps < size(); ++steps) {
    const RankBlock &block = layout_.block(rank);
    const std::uint64_t waits_for = block.waits_for.load(std::memory_order_relaxed);
    if (waits_for == 0)
      return rank;
    const auto next = std::size_t(waits_for & 0xffffffff) - 1;
    if (next >= size() || next == rank_)
      return rank;
    const std::uint64_t needs = block.needs.load(std::memory_order_relaxed);
    const RankBlock &other = layout_.block(next);
    const bool came = waits_for >> 32 ? std::max(other.headers[0].seq.load(),
                                                 other.headers[1].seq.load()) >= needs
                                      : other.progress.load() >= needs;
    if (came)
      return rank;
    rank = next;
  }
  return rank;
}

std::vector<std::size_t> Comm::culprits(const Task &op) const {
  std::vector<std::size_t> found;
  for (const Need &need : op.needs()) {
    const std::size_t q = op.breaks_all ? culprit(need.rank) : need.rank;
    if (std::find(found.begin(), found.end(), q) == found.end())
      found.push_back(q);
  }
  std::sort(found.begin(), found.end());
  return found;
}

// One write, so that lines of several ranks do not mix.
void Comm::warn(const Task &op, std::int64_t waited) const {
  static const char *const names[] = {"broadcast", "scatter", "gather", "reduce",
                                      "all_gather", "reduce_scatter", "all_reduce",
                                      "all_to_all", "barrier", "send", "recv"};
  std::string who;
  for (std::size_t q : culprits(op))
    who += (who.empty() ? "" : ", ") + std::to_string(q);
  const std::size_t kind = op.record ? op.record->note.collective : 0;
  char text[512];
  const int length = std::snprintf(
      text, sizeof text, "unisono: rank %zu has waited %.0f s in %s (seq %llu) for rank %s\n",
      rank_, double(waited) / 1e9, kind < std::size(names) ? names[kind] : "?",
      static_cast<unsigned long long>(op.seq), who.c_str());
  if (length > 0)
    (void)!::write(2, text, std::min(std::size_t(length), sizeof text - 1));
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
                                 void *output, std::int64_t timeout) {
  auto op = std::make_shared<Collective>(*this);
  op->queued = true;
  op->prepare(*plan, input, output, plan);
  op->timeout = timeout;
  record(*op, plan->note, now_ns());
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
