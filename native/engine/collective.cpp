// A call from beginning to end: what needs no waiting is published, all arrive, the program
// runs once for each piece, and those that others still read from stay until they have.

#include "engine/collective.hpp"

#include <algorithm>
#include <atomic>

#include "engine/comm.hpp"
#include "memory/wait.hpp"
#include "support/failpoint.hpp"

namespace unisono {

Collective::Collective(Comm &comm) : comm_(comm), operands_(comm.size()),
      reached_(comm.size()) {}

void Collective::prepare(std::shared_ptr<const Plan> plan, const void *input,
                         void *output) {
  plan_ = std::move(plan);
  input_ = static_cast<const std::byte *>(input);
  output_ = static_cast<std::byte *>(output);
  phase_ = Phase::begin;
  state.store(pending, std::memory_order_relaxed);
  verdict = {};
  sends = plan_->sent_bytes;
  encoded = decoded = 0;
  waiting_since = 0;
  warned = false;
  told_waiting = 0;
}

Status Collective::advance() {
  const Status status = go_on();
  if (status != Status::done || lent_ == 0)
    return status;
  // Somebody may have given up, and used a buffer for something else while we read it. The
  // fence keeps this look behind what was read, which an acquire by itself does not; it meets
  // the one in hands_off.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (const Verdict broken = comm_.verdict(); broken.trouble != Trouble::none) {
    verdict = broken;
    return Status::failed;
  }
  return status;
}

Status Collective::go_on() {
  if (lost_ != nobody)
    return give_up();
  if (phase_ != Phase::begin)
    depart();
  switch (phase_) {
  case Phase::begin:
    begin();
    // Nothing of it may be sent when a call before it has failed: those who do not know
    // yet are still in that one, and would take this for a mismatch.
    if (const Verdict broken = comm_.verdict(); broken.trouble != Trouble::none) {
      verdict = broken;
      return Status::failed;
    }
    lend();
    phase_ = Phase::lead;
    depart();
    [[fallthrough]];
  case Phase::lead:
    if (!lead())
      return Status::blocked;
    phase_ = Phase::arrive;
    depart(); // what was published: should calls differ, others must see it, too
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
    if (lost_ != nobody)
      return give_up();
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
    end_wait(Moment::exit);
    phase_ = Phase::end;
    failpoint("call.end");
    [[fallthrough]];
  case Phase::end:
    break;
  }
  hold_.clear();
  return Status::done;
}

void Collective::begin() {
  failpoint("call.begin");
  seq = ++comm_.seq;
  first_generation_ = comm_.generation;
  piece_ = 0;
  action_ = arriving_ = wait_ = 0;
  lent_ = 0;
  lost_ = nobody;
  free_ = plan_->in_header;
  flags_ = 0;
  if (plan_->lent_always >= 0)
    lent_ = unsigned(plan_->lent_always);
  program_ = plan_->programs[lent_].get();
  cursors_.assign(program_->courses.size(), {});
  if (!program_->courses.empty() || !program_->incoming.empty())
    came_.assign(comm_.size(), 0);
  at_ = arrived_ = 0;
  awaited_ = nobody;
  traced_ = comm_.trace().on();
  posted_ = since_ = received_ = lately_ = encoding_ = 0;
  whom_ = nobody;
  Note &note = comm_.layout().block(comm_.rank()).notes[seq & 1];
  note = plan_->note;
  note.seq = seq;
}

// Where the input is not lent, what others read of it can be published before anybody has
// arrived; the header then says that it is there.
bool Collective::lead() {
  if ((flags_ & Header::lends_input) == 0 && lent_ == 0) {
    const std::size_t count = std::size_t(program_->lead[comm_.rank()]);
    if (count > 0 && !window_free())
      return false;
    for (; action_ < count; ++action_)
      (void)(traced_ ? traced(program_->actions[action_])
                     : perform(program_->actions[action_])); // of our own memory
    failpoint("lead.done");
    if (count > 0 && !plan_->in_header)
      comm_.layout().block(comm_.rank()).progress.store(
          progress_word(first_generation_, count), std::memory_order_release);
    flags_ |= Header::led;
  }
  post(flags_);
  return true;
}

void Collective::post(std::uint64_t flags) {
  Header &header = comm_.layout().block(comm_.rank()).headers[seq & 1];
  header.fingerprint = plan_->fingerprint;
  header.flags = flags;
  header.seq.store(seq, std::memory_order_release);
  ring(comm_.layout(), comm_.size());
  if (traced_)
    posted_ = now_ns();
  lately_ = 0;
  failpoint("arrive.posted");
}

Status Collective::arrive() {
  const std::vector<std::size_t> &here = comm_.here();
  for (; arriving_ < here.size(); ++arriving_) {
    // Each begins with its neighbour, so that they do not all wait for the same line.
    const std::size_t q = here[arriving_];
    const Header &header = comm_.layout().block(q).headers[seq & 1];
    if (header.seq.load(std::memory_order_acquire) != seq) {
      whom_ = q;
      return Status::blocked;
    }
    if (header.fingerprint != plan_->fingerprint) {
      verdict = {Trouble::mismatch, std::uint32_t(q), std::uint32_t(comm_.rank()),
                 std::uint32_t(seq)};
      return Status::failed;
    }
    // Whoever arrives has ended all earlier calls, and may have published its lead.
    const bool has_led = (header.flags & Header::led) != 0;
    const std::uint64_t led = has_led ? std::uint64_t(program_->lead[q]) : 0;
    comm_.seen[q] = std::max(comm_.seen[q], progress_word(first_generation_, led));
    ++moved;
  }
  failpoint("arrive.seen");
  end_arrival();
  return settle();
}

// All have arrived, so all know which buffers everybody lends.
Status Collective::settle() {
  const Status status = agree();
  if (status == Status::done)
    comm_.generation = first_generation_ + std::uint64_t(plan_->pieces[lent_]);
  else
    lately_ = 0;
  return status;
}

// A rank's memory could not be reached. Most likely it has died, or has given the call up:
// we shall know in a moment. If neither, it cannot be helped.
Status Collective::give_up() {
  const std::int64_t now = now_ns();
  if (lost_since_ == 0)
    lost_since_ = now;
  if (now - lost_since_ < word_of_death)
    return Status::blocked;
  const Trouble trouble = comm_.far(lost_) ? Trouble::severed : Trouble::unreachable;
  verdict = comm_.condemn({trouble, std::uint32_t(lost_),
                           std::uint32_t(comm_.rank()), std::uint32_t(seq)});
  return Status::failed;
}

Status Collective::generations() {
  const Program &program = *program_;
  const std::size_t shared_actions = program.actions.size() - std::size_t(program.tail);
  for (; piece_ < plan_->pieces[lent_]; ++piece_, action_ = 0, wait_ = 0, free_ = false) {
    if (!window_free())
      return Status::blocked;
    const std::uint64_t generation = first_generation_ + std::uint64_t(piece_);
    for (; action_ < program.actions.size(); ++action_) {
      const Program::Action &action = program.actions[action_];
      if (!ready(action))
        return Status::blocked;
      end_wait(Moment::wait);
      failpoint("action.begin");
      if (arrives(action)) {
        const Status status = traced_ ? traced_receive(action) : receive(action);
        if (status != Status::done)
          return status;
      } else {
        lost_ = traced_ ? traced(action) : perform(action);
      }
      if (lost_ != nobody) {
        lost_since_ = 0;
        return Status::blocked;
      }
      wait_ = 0;
      ++moved;
      if (action_ < shared_actions && action_ + 1 < program.actions.size())
        report(generation, action_ + 1);
      failpoint("action.done");
      if (!program_->courses.empty()) {
        ++action_; // what it made may leave
        depart();
        --action_;
        if (lost_ != nobody)
          return Status::blocked;
      }
    }
    report(generation + 1, 0);
    failpoint("generation.done");
  }
  return Status::done;
}

// This generation's half of the window is free when its readers have ended the generation
// that used it before.
bool Collective::window_free() {
  if (free_)
    return true;
  const std::uint64_t generation = first_generation_ + std::uint64_t(piece_);
  // Those who read what was put there last, which may have been another program's.
  auto &readers = comm_.window_readers[generation & 1];
  for (; wait_ < readers.size(); ++wait_)
    if (!passed({readers[wait_], 0}, generation - 1)) {
      begin_wait(std::size_t(readers[wait_]));
      return false;
    }
  end_wait(Moment::wait);
  readers = program_->readers;
  wait_ = 0;
  free_ = true;
  return true;
}

bool Collective::reached(std::int32_t rank, std::uint64_t word) {
  std::uint64_t &seen = comm_.seen[std::size_t(rank)];
  if (seen >= word)
    return true;
  seen = comm_.layout().block(std::size_t(rank)).progress.load(std::memory_order_acquire);
  return seen >= word;
}

// A rank here has done so many actions; or so many messages to one elsewhere have left.
bool Collective::passed(const Program::Wait &wait, std::uint64_t generation) {
  if (comm_.far(std::size_t(wait.rank)))
    return departed(wait, generation);
  return reached(wait.rank, progress_word(generation, std::uint64_t(wait.count)));
}

bool Collective::departed(const Program::Wait &wait, std::uint64_t generation) const {
  if (generation < first_generation_) // an earlier call, which has ended here
    return true;
  return has_left(std::size_t(wait.rank), generation - first_generation_,
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

// Tells the others here how far this rank is.
void Collective::report(std::uint64_t generation, std::uint64_t actions) {
  comm_.layout().block(comm_.rank()).progress.store(progress_word(generation, actions),
                                                    std::memory_order_release);
  ring(comm_.layout(), comm_.size());
}

} // namespace unisono
