#include "collective.hpp"

#include <algorithm>
#include <cstring>

#include "comm.hpp"
#include "failpoint.hpp"
#include "mesh.hpp"
#include "wait.hpp"

namespace unisono {

Collective::Collective(Comm &comm) : comm_(comm), operands_(comm.size()),
      reached_(comm.size()) {}

void Collective::prepare(const Plan &plan, const void *input, void *output,
                         std::shared_ptr<const Plan> keep) {
  plan_ = &plan;
  keep_ = std::move(keep);
  input_ = static_cast<const std::byte *>(input);
  output_ = static_cast<std::byte *>(output);
  phase_ = Phase::begin;
  state.store(pending, std::memory_order_relaxed);
  verdict = {};
  sends = plan.sent_bytes;
  encoded = decoded = 0;
  waiting_since = 0;
  warned = false;
  told_waiting = 0;
}

Status Collective::advance() {
  const Status status = go_on();
  if (status == Status::done && lent_ != 0 && comm_.verdict().trouble != Trouble::none) {
    // Somebody gave up, and may have used a buffer for something else while we read it.
    verdict = comm_.verdict();
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
  if (!plan_->may_lend || (lent_ != 0 && comm_.here().size() == 1))
    return;
  // A buffer of no bytes, which nobody reads, may as well be lent.
  Lent lent[2] = {};
  if (lends(input_, plan_->input_bytes, false, lent[0]))
    flags_ |= Header::lends_input;
  if (lends(output_, plan_->output_bytes, true, lent[1]))
    flags_ |= Header::lends_output;
  std::memcpy(comm_.layout().block(comm_.rank()).headers[seq & 1].payload, lent, sizeof lent);
}

bool Collective::lends(const std::byte *data, std::size_t bytes, bool for_writing,
                       Lent &lent) {
  if (bytes == 0)
    return true;
  const auto found = comm_.mesh().locate(data, bytes);
  if (found)
    lent = *found;
  else if (lent_ != 0 ||
           (plan_->may_reach && comm_.lending().reach() == Lending::reaches &&
            comm_.lending().reachable(data, bytes, for_writing)))
    lent = {Lent::own, reinterpret_cast<std::uintptr_t>(data)};
  else
    return false;
  return true;
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

Status Collective::agree() {
  const std::size_t n = comm_.size();
  if (plan_->lent_always < 0) {
    if (!plan_->may_lend || (flags_ & (Header::lends_input | Header::lends_output)) == 0)
      return Status::done;
    std::uint64_t all = flags_;
    for (const std::size_t q : comm_.here())
      all &= comm_.layout().block(q).headers[seq & 1].flags;
    lent_ = unsigned(all >> 1 & 3);
    if (!plan_->programs[lent_])
      lent_ = 0;
  }
  if (lent_ == 0)
    return Status::done;
  const Program &program = *plan_->programs[lent_];
  inputs_.assign(n, {});
  outputs_.assign(n, {});
  hold_.clear();
  // Only those that are used: their ranks do not end this call, nor let go of them, before
  // they have been. Whoever is not used may be gone already.
  for (const Program::Source &source : program.sources)
    if (source.home != Program::window && source.home != Program::stream &&
        !resolve(std::size_t(source.rank), source.home == Program::input))
      return Status::blocked;
  for (const std::int32_t q : program.deliveries)
    if (!resolve(std::size_t(q), false))
      return Status::blocked;
  program_ = &program;
  return Status::done;
}

// Finds a buffer of another rank; false if its descriptor is still on the way.
bool Collective::resolve(std::size_t rank, bool input) {
  Reach &found = (input ? inputs_ : outputs_)[rank];
  if (rank == comm_.rank() || found.at != nullptr)
    return true;
  Lent lent[2];
  std::memcpy(lent, comm_.layout().block(rank).headers[seq & 1].payload, sizeof lent);
  const Lent &from = lent[input ? 0 : 1];
  if (from.segment == 0)
    return true; // a buffer of no bytes
  found = comm_.mesh().resolve(comm_.world_rank(rank), from, hold_);
  return found.at != nullptr;
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
        report(action_ + 1);
      failpoint("action.done");
      if (!program_->courses.empty()) {
        ++action_; // what it made may leave
        depart();
        --action_;
        if (lost_ != nobody)
          return Status::blocked;
      }
    }
    const std::uint64_t next = first_generation_ + std::uint64_t(piece_) + 1;
    comm_.layout().block(comm_.rank()).progress.store(progress_word(next, 0),
                                                      std::memory_order_release);
    ring(comm_.layout(), comm_.size());
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

void Collective::report(std::uint64_t actions) {
  const std::uint64_t generation = first_generation_ + std::uint64_t(piece_);
  comm_.layout().block(comm_.rank()).progress.store(progress_word(generation, actions),
                                                    std::memory_order_release);
  ring(comm_.layout(), comm_.size());
}

bool Collective::hindered_by(std::size_t rank) const {
  if (rank == lost_)
    return true;
  if (comm_.far(rank))
    return phase_ != Phase::begin && crosses(rank);
  // Before all have arrived we do not know how many generations there will be.
  const bool settled = phase_ != Phase::lead && phase_ != Phase::arrive;
  const std::uint64_t end = settled ? comm_.generation : first_generation_ + 1;
  return phase_ != Phase::begin &&
         comm_.layout().block(rank).progress.load(std::memory_order_acquire) <
             progress_word(end, 0);
}

std::vector<Need> Collective::needs() const {
  std::vector<Need> open;
  if (lost_ != nobody)
    return {{lost_, true, seq + 1}};
  const auto awaits = [&](const Program::Wait &wait, std::uint64_t generation) {
    const auto q = std::size_t(wait.rank);
    const std::uint64_t word = progress_word(generation, std::uint64_t(wait.count));
    if (comm_.far(q)) {
      if (!departed(wait, generation))
        open.push_back({q, true, ~std::uint64_t(0)});
    } else if (q != comm_.rank() && comm_.layout().block(q).progress.load() < word) {
      open.push_back({q, false, word});
    }
  };
  const std::uint64_t generation = first_generation_ + std::uint64_t(piece_);
  switch (phase_) {
  case Phase::lead:
    for (const std::int32_t q : comm_.window_readers[first_generation_ & 1])
      awaits({q, 0}, first_generation_ - 1);
    break;
  case Phase::arrive:
    for (const std::size_t q : comm_.here())
      if (comm_.layout().block(q).headers[seq & 1].seq.load() != seq)
        open.push_back({q, true, seq});
    break;
  case Phase::generations:
    if (!free_) {
      for (const std::int32_t q : comm_.window_readers[generation & 1])
        awaits({q, 0}, generation - 1);
    } else if (awaited_ != nobody) {
      open.push_back({awaited_, true, ~std::uint64_t(0)});
    } else if (action_ < program_->actions.size()) {
      const Program::Action &action = program_->actions[action_];
      for (auto w = action.first_wait; w < action.end_wait; ++w)
        awaits(program_->waits[std::size_t(w)], generation);
    }
    break;
  case Phase::exit:
    for (const auto &wait : program_->exits)
      awaits(wait, comm_.generation - 1);
    break;
  default:
    break;
  }
  if (open.empty()) // a descriptor that is on the way
    for (std::size_t q = 0; q < comm_.size(); ++q)
      if (q != comm_.rank() && hindered_by(q))
        open.push_back({q, true, seq});
  return open;
}

} // namespace unisono
