// A call from beginning to end: this rank publishes what it can without waiting, all ranks
// arrive, the program runs once for each piece, and a rank returns only when no other rank
// still reads from it.

#include "engine/collective.hpp"

#include <algorithm>
#include <atomic>

#include "engine/comm.hpp"
#include "memory/wait.hpp"
#include "net/io_threads.hpp"
#include "support/failpoint.hpp"

namespace unisono {

void Collective::prepare(std::shared_ptr<const Plan> plan, const void *input,
                         void *output) {
  plan_ = std::move(plan);
  input_ = static_cast<const std::byte *>(input);
  output_ = static_cast<std::byte *>(output);
  release_buffers();
  phase_ = Phase::begin;
  state.store(pending, std::memory_order_relaxed);
  failure = {};
  sends = plan_->sent_bytes;
  encoded = decoded = 0;
  waiting_since = 0;
  warned = false;
  announced_wait = 0;
}

Status Collective::advance() {
  const Status status = run_phases();
  if (status != Status::done || exposed_ == 0)
    return status;
  // Another rank may have given up the call and reused a buffer while this rank was reading
  // it. The fence orders these loads after those reads, which an acquire load alone does
  // not; it pairs with the fence in ZeroCopy::give_up. A failure alone is no reason: ranks
  // that have done their part may have failed in a later call.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (const Failure broken = comm_.failure();
      broken.ends(seq) && comm_.zero_copy().given_up(seq)) {
    failure = broken;
    return Status::failed;
  }
  return status;
}

Status Collective::run_phases() {
  if (unreachable_ != no_rank)
    return fail_unreachable();
  if (phase_ != Phase::begin)
    send_messages();
  switch (phase_) {
  case Phase::begin:
    begin();
    // Nothing of this call may be sent when an earlier call has failed: ranks that do not
    // know of the failure are still in that call, and would report a mismatch.
    if (const Failure broken = comm_.failure(); broken.ends(seq)) {
      failure = broken;
      return Status::failed;
    }
    expose_buffers();
    phase_ = Phase::lead;
    send_messages();
    [[fallthrough]];
  case Phase::lead:
    if (!lead())
      return Status::blocked;
    phase_ = Phase::arrive;
    send_messages(); // what was published: if calls differ, remote ranks must see it too
    [[fallthrough]];
  case Phase::arrive: {
    const Status status = arrive();
    if (status != Status::done)
      return status;
    phase_ = Phase::generations;
    [[fallthrough]];
  }
  case Phase::generations: {
    const Status status = generations();
    if (unreachable_ != no_rank)
      return fail_unreachable();
    if (status != Status::done)
      return status;
    phase_ = Phase::exit;
    wait_ = 0;
    [[fallthrough]];
  }
  case Phase::exit:
    for (; wait_ < program_->exits.size(); ++wait_) {
      failpoint("exit.wait");
      if (!passed(program_->exits[wait_], comm_.generation - 1)) {
        begin_wait(std::size_t(program_->exits[wait_].rank));
        return Status::blocked;
      }
    }
    if (sends_in_shares())
      return Status::blocked;
    end_wait(Moment::exit);
    phase_ = Phase::end;
    failpoint("call.end");
    [[fallthrough]];
  case Phase::end:
    break;
  }
  return_ends();
  mapped_.clear();
  return Status::done;
}

void Collective::begin() {
  failpoint("call.begin");
  seq = comm_.seq.load(std::memory_order_relaxed) + 1;
  comm_.seq.store(seq, std::memory_order_relaxed);
  first_generation_ = comm_.generation;
  piece_ = 0;
  action_ = arriving_ = wait_ = 0;
  exposed_ = 0;
  unreachable_ = no_rank;
  window_free_ = plan_->in_header;
  flags_ = 0;
  if (plan_->always_exposed >= 0)
    exposed_ = unsigned(plan_->always_exposed);
  program_ = plan_->programs[exposed_].get();
  cursors_.assign(program_->outgoing.size(), {});
  io_threads_ = threads_ == nullptr ? 0
                : program_->adds    ? threads_->adders()
                                    : threads_->count();
  num_receiving_ = 0;
  mismatch_since_ = 0;
  alone_ = false;
  if (!program_->outgoing.empty() || !program_->incoming.empty())
    received_.assign(comm_.size(), 0);
  at_ = arrived_ = 0;
  awaited_sender_ = no_rank;
  traced_ = comm_.trace().on();
  posted_ = wait_begun_ = receive_begun_ = last_clock_ = encoding_ = 0;
  awaited_rank_ = no_rank;
  Note &note = comm_.layout().block(comm_.rank()).notes[seq & 1];
  note = plan_->note;
  note.seq = seq;
}

// If the input is not exposed, what other ranks read of it can be published before any rank
// has arrived; a flag in the header says so.
bool Collective::lead() {
  if ((flags_ & Header::exposes_input) == 0 && exposed_ == 0) {
    const std::size_t count = std::size_t(program_->lead[comm_.rank()]);
    if (count > 0 && !window_free())
      return false;
    for (; action_ < count; ++action_)
      (void)(traced_ ? run_traced(program_->actions[action_])
                     // reads only memory of this rank
                     : run_action(program_->actions[action_]));
    failpoint("lead.done");
    if (count > 0 && !plan_->in_header)
      comm_.layout().block(comm_.rank()).progress.store(
          progress_word(first_generation_, count), std::memory_order_release);
    flags_ |= Header::led;
  }
  publish_arrival(flags_);
  return true;
}

void Collective::publish_arrival(std::uint64_t flags) {
  Header &header = comm_.layout().block(comm_.rank()).headers[seq & 1];
  header.fingerprint = plan_->fingerprint;
  header.flags = flags;
  header.seq.store(seq, std::memory_order_release);
  wake_sleepers(comm_.layout(), comm_.size());
  if (traced_)
    posted_ = now_ns();
  last_clock_ = 0;
  failpoint("arrive.posted");
}

Status Collective::arrive() {
  const std::vector<std::size_t> &local = comm_.local_ranks();
  for (; arriving_ < local.size(); ++arriving_) {
    // Each rank begins with its neighbour, so that they do not all poll the same cache
    // line.
    const std::size_t q = local[arriving_];
    const Header &header = comm_.layout().block(q).headers[seq & 1];
    if (header.seq.load(std::memory_order_acquire) != seq) {
      awaited_rank_ = q;
      return Status::blocked;
    }
    if (header.fingerprint != plan_->fingerprint) {
      failure = {FailureKind::mismatch, std::uint32_t(q), std::uint32_t(comm_.rank()),
                 std::uint32_t(seq)};
      return Status::failed;
    }
    // A rank that has arrived has finished all earlier calls, and may have published its
    // lead.
    const bool has_led = (header.flags & Header::led) != 0;
    const std::uint64_t led = has_led ? std::uint64_t(program_->lead[q]) : 0;
    comm_.seen[q] = std::max(comm_.seen[q], progress_word(first_generation_, led));
    ++moved;
  }
  failpoint("arrive.seen");
  end_arrival();
  return begin_generations();
}

// All ranks have arrived, so each knows which buffers the others expose.
Status Collective::begin_generations() {
  const Status status = map_exposed();
  if (status == Status::done)
    comm_.generation = first_generation_ + std::uint64_t(plan_->pieces[exposed_]);
  else
    last_clock_ = 0;
  return status;
}

// The memory of a rank could not be accessed. Most likely the rank has died or has aborted
// the call, and a notice will follow. If none does, the call fails.
Status Collective::fail_unreachable() {
  const std::int64_t now = now_ns();
  if (unreachable_since_ == 0)
    unreachable_since_ = now;
  if (now - unreachable_since_ < death_notice_grace)
    return Status::blocked;
  const FailureKind kind = !comm_.is_remote(unreachable_)  ? FailureKind::unreachable
                           : comm_.has_left(unreachable_) ? FailureKind::closed
                                                          : FailureKind::connection_lost;
  failure = comm_.abort({kind, std::uint32_t(unreachable_),
                           std::uint32_t(comm_.rank()), std::uint32_t(seq)});
  return Status::failed;
}

Status Collective::generations() {
  const Program &program = *program_;
  bool holds_back = false; // what the last action made is to be sent
  for (; piece_ < plan_->pieces[exposed_];
       ++piece_, action_ = 0, wait_ = 0, window_free_ = false) {
    if (!window_free())
      return Status::blocked;
    const std::uint64_t generation = first_generation_ + std::uint64_t(piece_);
    for (; action_ < program.actions.size(); ++action_) {
      const Program::Action &action = program.actions[action_];
      if (!ready(action)) {
        if (holds_back)
          send_messages();
        return Status::blocked;
      }
      end_wait(Moment::wait);
      holds_back = false;
      failpoint("action.begin");
      if (receives(action)) {
        const Status status = traced_ ? receive_traced(action) : receive(action);
        if (status != Status::done)
          return status;
      } else {
        unreachable_ = traced_ ? run_traced(action) : run_action(action);
      }
      if (unreachable_ != no_rank) {
        unreachable_since_ = 0;
        return Status::blocked;
      }
      wait_ = 0;
      ++moved;
      // The last action is reported as the end of the generation.
      if (action.is_awaited && action_ + 1 < program.actions.size())
        report(generation, action_ + 1);
      failpoint("action.done");
      if (!program_->outgoing.empty()) {
        ++action_; // its result may be sent
        // Other threads begin to receive before this one is busy sending.
        holds_back = num_receiving_ == 0 && action_ < program.actions.size() &&
                     receives_in_shares(program.actions[action_]);
        if (!holds_back)
          send_messages();
        --action_;
        if (unreachable_ != no_rank)
          return Status::blocked;
      }
    }
    report(generation + 1, 0);
    failpoint("generation.done");
  }
  return Status::done;
}

// This generation's half of the window is free when its readers have finished the
// generation that used it before.
bool Collective::window_free() {
  if (window_free_)
    return true;
  const std::uint64_t generation = first_generation_ + std::uint64_t(piece_);
  // The readers of what the half holds now, which another program may have written.
  auto &readers = comm_.window_readers[generation & 1];
  for (; wait_ < readers.size(); ++wait_)
    if (!passed({readers[wait_], 0}, generation - 1)) {
      begin_wait(std::size_t(readers[wait_]));
      return false;
    }
  end_wait(Moment::wait);
  readers = program_->readers;
  wait_ = 0;
  window_free_ = true;
  return true;
}

bool Collective::reached(std::int32_t rank, std::uint64_t word) {
  std::uint64_t &seen = comm_.seen[std::size_t(rank)];
  if (seen >= word)
    return true;
  seen = comm_.layout().block(std::size_t(rank)).progress.load(std::memory_order_acquire);
  return seen >= word;
}

// Whether a local rank has done a number of actions, or a number of messages to a remote
// rank have been sent.
bool Collective::passed(const Program::Wait &wait, std::uint64_t generation) {
  if (comm_.is_remote(std::size_t(wait.rank)))
    return messages_sent(wait, generation);
  return reached(wait.rank, progress_word(generation, std::uint64_t(wait.count)));
}

bool Collective::messages_sent(const Program::Wait &wait, std::uint64_t generation) const {
  if (generation < first_generation_) // an earlier call, which this rank has finished
    return true;
  return has_sent(std::size_t(wait.rank), generation - first_generation_,
                  std::uint64_t(wait.count));
}

bool Collective::ready(const Program::Action &action) {
  const std::uint64_t generation = first_generation_ + std::uint64_t(piece_);
  const std::size_t count = std::size_t(action.end_wait - action.first_wait);
  for (; wait_ < count; ++wait_) {
    const Program::Wait &wait = program_->waits[std::size_t(action.first_wait) + wait_];
    if (!passed(wait, generation)) {
      begin_wait(std::size_t(wait.rank));
      return false;
    }
  }
  return true;
}

// Publishes this rank's progress to the local ranks.
void Collective::report(std::uint64_t generation, std::uint64_t actions) {
  comm_.layout().block(comm_.rank()).progress.store(progress_word(generation, actions),
                                                    std::memory_order_release);
  wake_sleepers(comm_.layout(), comm_.size());
}

} // namespace unisono
