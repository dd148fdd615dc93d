#include "collective.hpp"

#include <algorithm>
#include <cstring>

#include "comm.hpp"
#include "copy.hpp"
#include "failpoint.hpp"
#include "mesh.hpp"
#include "wait.hpp"

namespace unisono {

namespace {

// A result that goes to two places is made in blocks of this size, so that the second
// write finds it in the first cache.
constexpr std::size_t block_bytes = 8192;

void plain_copy(std::byte *to, const std::byte *from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

} // namespace

Collective::Collective(Comm &comm) : comm_(comm), operands_(comm.size()) {}

void Collective::prepare(const Plan &plan, const void *input, void *output,
                         std::shared_ptr<const Plan> keep) {
  plan_ = &plan;
  keep_ = std::move(keep);
  input_ = static_cast<const std::byte *>(input);
  output_ = static_cast<std::byte *>(output);
  phase_ = Phase::begin;
  state.store(pending, std::memory_order_relaxed);
  verdict = {};
  waiting_since = 0;
  warned = false;
}

Status Collective::advance() {
  switch (phase_) {
  case Phase::begin:
    begin();
    phase_ = Phase::lead;
    [[fallthrough]];
  case Phase::lead:
    if (!lead())
      return Status::blocked;
    phase_ = Phase::arrive;
    [[fallthrough]];
  case Phase::arrive: {
    const Status status = arrive();
    if (status != Status::done)
      return status;
    phase_ = Phase::generations;
    [[fallthrough]];
  }
  case Phase::generations:
    if (!generations())
      return Status::blocked;
    phase_ = Phase::exit;
    wait_ = 0;
    [[fallthrough]];
  case Phase::exit:
    for (; wait_ < program_->exits.size(); ++wait_) {
      failpoint("exit.wait");
      const auto &w = program_->exits[wait_];
      const std::uint64_t last = first_generation_ + std::uint64_t(plan_->pieces) - 1;
      if (!reached(w.rank, progress_word(last, std::uint64_t(w.count))))
        return Status::blocked;
    }
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
  comm_.generation += std::uint64_t(plan_->pieces);
  piece_ = 0;
  action_ = arriving_ = wait_ = 0;
  lent_ = 0;
  free_ = plan_->in_header;
  flags_ = 0;
  program_ = plan_->programs[0].get();
  Note &note = comm_.layout().block(comm_.rank()).notes[seq & 1];
  note = plan_->note;
  note.seq = seq;
  if (!plan_->may_lend)
    return;
  // A buffer of no bytes, which nobody reads, may as well be lent.
  Lent lent[2] = {};
  if (lends(input_, plan_->input_bytes, lent[0]))
    flags_ |= Header::lends_input;
  if (lends(output_, plan_->output_bytes, lent[1]))
    flags_ |= Header::lends_output;
  std::memcpy(comm_.layout().block(comm_.rank()).headers[seq & 1].payload, lent, sizeof lent);
}

bool Collective::lends(const void *data, std::size_t bytes, Lent &lent) const {
  if (bytes == 0)
    return true;
  const auto found = comm_.mesh().locate(data, bytes);
  lent = found.value_or(Lent{});
  return found.has_value();
}

// Where the input is not lent, what others read of it can be published before anybody has
// arrived; the header then says that it is there.
bool Collective::lead() {
  if ((flags_ & Header::lends_input) == 0) {
    const std::size_t count = std::size_t(program_->lead[comm_.rank()]);
    if (count > 0 && !window_free())
      return false;
    for (; action_ < count; ++action_)
      perform(program_->actions[action_]);
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
  failpoint("arrive.posted");
}

Status Collective::arrive() {
  const std::size_t n = comm_.size();
  for (; arriving_ < n; ++arriving_) {
    // Each begins with its neighbour, so that they do not all wait for the same line.
    std::size_t q = comm_.rank() + 1 + arriving_;
    q = q >= n ? q - n : q;
    const Header &header = comm_.layout().block(q).headers[seq & 1];
    if (header.seq.load(std::memory_order_acquire) != seq)
      return Status::blocked;
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
  return settle();
}

// All have arrived, so all know which buffers everybody lends.
Status Collective::settle() {
  if (!plan_->may_lend || (flags_ & (Header::lends_input | Header::lends_output)) == 0)
    return Status::done;
  const std::size_t n = comm_.size();
  std::uint64_t all = flags_;
  for (std::size_t q = 0; q < n; ++q)
    all &= comm_.layout().block(q).headers[seq & 1].flags;
  lent_ = unsigned(all >> 1 & 3);
  if (!plan_->programs[lent_])
    lent_ = 0;
  if (lent_ == 0)
    return Status::done;
  const Program &program = *plan_->programs[lent_];
  inputs_.assign(n, nullptr);
  outputs_.assign(n, nullptr);
  hold_.clear();
  // Only those that are read: their ranks do not end this call, nor let go of them, before
  // they have been. Whoever is not read may be gone already.
  for (const Program::Source &source : program.sources) {
    const auto q = std::size_t(source.rank);
    if (q == comm_.rank() || source.home == Program::window)
      continue;
    const bool input = source.home == Program::input;
    const std::byte *&found = (input ? inputs_ : outputs_)[q];
    if (found != nullptr)
      continue;
    Lent lent[2];
    std::memcpy(lent, comm_.layout().block(q).headers[seq & 1].payload, sizeof lent);
    const Lent &from = lent[input ? 0 : 1];
    if (from.segment == 0)
      continue; // a buffer of no bytes
    found = comm_.mesh().resolve(comm_.world_rank(q), from, hold_);
    if (found == nullptr)
      return Status::blocked; // its descriptor is still on the way
  }
  program_ = &program;
  return Status::done;
}

bool Collective::generations() {
  const Program &program = *program_;
  const std::size_t shared_actions = program.actions.size() - std::size_t(program.tail);
  for (; piece_ < plan_->pieces; ++piece_, action_ = 0, wait_ = 0, free_ = false) {
    if (!window_free())
      return false;
    for (; action_ < program.actions.size(); ++action_) {
      const Program::Action &action = program.actions[action_];
      if (!ready(action))
        return false;
      failpoint("action.begin");
      perform(action);
      wait_ = 0;
      ++moved;
      if (action_ < shared_actions && action_ + 1 < program.actions.size())
        report(action_ + 1);
      failpoint("action.done");
    }
    const std::uint64_t next = first_generation_ + std::uint64_t(piece_) + 1;
    comm_.layout().block(comm_.rank()).progress.store(progress_word(next, 0),
                                                      std::memory_order_release);
    ring(comm_.layout(), comm_.size());
    failpoint("generation.done");
  }
  return true;
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
    if (!reached(readers[wait_], progress_word(generation - 1, 0)))
      return false;
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

bool Collective::ready(const Program::Action &action) {
  const std::uint64_t generation = first_generation_ + std::uint64_t(piece_);
  const std::size_t count = std::size_t(action.end_wait - action.first_wait);
  for (; wait_ < count; ++wait_) {
    const auto &w = program_->waits[std::size_t(action.first_wait) + wait_];
    if (!reached(w.rank, progress_word(generation, std::uint64_t(w.count))))
      return false;
  }
  return true;
}

void Collective::report(std::uint64_t actions) {
  const std::uint64_t generation = first_generation_ + std::uint64_t(piece_);
  comm_.layout().block(comm_.rank()).progress.store(progress_word(generation, actions),
                                                    std::memory_order_release);
  ring(comm_.layout(), comm_.size());
}

std::byte *Collective::place(std::size_t rank, std::int32_t index) {
  const std::size_t at = std::size_t(index) * std::size_t(plan_->piece) * plan_->itemsize;
  if (plan_->in_header)
    return comm_.layout().block(rank).headers[seq & 1].payload + at;
  return comm_.layout().window(rank, first_generation_ + std::uint64_t(piece_)) + at;
}

const std::byte *Collective::address(const Program::Source &source, std::int64_t first) {
  const auto rank = std::size_t(source.rank), index = std::size_t(source.index);
  const bool own = rank == comm_.rank();
  switch (source.home) {
  case Program::input:
    return (own ? input_ : inputs_[rank]) +
           std::size_t(plan_->input_at[index] + first) * plan_->itemsize;
  case Program::output:
    return (own ? output_ : outputs_[rank]) +
           std::size_t(plan_->output_at[index] + first) * plan_->itemsize;
  default:
    return place(rank, source.index);
  }
}

void Collective::perform(const Program::Action &action) {
  const std::int64_t size = plan_->size[std::size_t(action.chunk)];
  const std::int64_t first = std::min(piece_ * plan_->piece, size);
  const auto count = std::size_t(std::min(plan_->piece, size - first));
  if (count == 0)
    return;
  std::byte *window = action.window < 0 ? nullptr : place(comm_.rank(), action.window);
  std::byte *output =
      action.output < 0 ? nullptr
                        : output_ + std::size_t(plan_->output_at[std::size_t(action.output)] +
                                                first) * plan_->itemsize;
  const auto sources = std::size_t(action.end_source - action.first_source);
  const auto *source = &program_->sources[std::size_t(action.first_source)];
  const std::size_t bytes = count * plan_->itemsize;
  const bool streams = output != nullptr && plan_->streams && !warm(action, sources);
  if (sources == 1) {
    const std::byte *from = address(*source, first);
    if (window != nullptr)
      std::memcpy(window, from, bytes);
    if (output != nullptr && output != from)
      (streams ? stream_copy : plain_copy)(output, window ? window : from, bytes);
    return;
  }
  for (std::size_t s = 0; s < sources; ++s)
    operands_[s] = address(source[s], first);
  const std::uint32_t divisor = action.completes ? plan_->divisor : 1;
  if (output == nullptr || (window == nullptr && !streams)) {
    plan_->kernel(window ? window : output, operands_.data(), sources, count, divisor);
    return;
  }
  reduce_twice(window, output, streams, sources, count, divisor);
}

// A result that goes on to the output from the window, or from a scrap of memory.
void Collective::reduce_twice(std::byte *window, std::byte *output, bool streams,
                              std::size_t sources, std::size_t count,
                              std::uint32_t divisor) {
  alignas(line_size) std::byte scrap[block_bytes];
  const std::size_t block = block_bytes / plan_->itemsize;
  for (std::size_t done = 0; done < count; done += block) {
    const std::size_t some = std::min(block, count - done);
    const std::size_t step = some * plan_->itemsize;
    std::byte *first = window ? window + done * plan_->itemsize : scrap;
    plan_->kernel(first, operands_.data(), sources, some, divisor);
    (streams ? stream_copy : plain_copy)(output, first, step);
    output += step;
    for (std::size_t s = 0; s < sources; ++s)
      operands_[s] = static_cast<const std::byte *>(operands_[s]) + step;
  }
}

// Whether this piece of the output is in the cache, because it has just been read as input.
bool Collective::warm(const Program::Action &action, std::size_t sources) const {
  if (plan_->input_bytes == 0 || (sources == 1 && (lent_ & 1) != 0))
    return false;
  const auto chunk = std::size_t(action.output);
  const auto in = plan_->input_at[chunk], out = plan_->output_at[chunk];
  return input_ + std::size_t(in) * plan_->itemsize ==
         output_ + std::size_t(out) * plan_->itemsize;
}

bool Collective::hindered_by(std::size_t rank) const {
  const std::uint64_t end = first_generation_ + std::uint64_t(plan_->pieces);
  return phase_ != Phase::begin &&
         comm_.layout().block(rank).progress.load(std::memory_order_acquire) <
             progress_word(end, 0);
}

std::vector<Need> Collective::needs() const {
  std::vector<Need> open;
  const auto progress = [&](std::size_t q, std::uint64_t word) {
    if (q != comm_.rank() && comm_.layout().block(q).progress.load() < word)
      open.push_back({q, false, word});
  };
  const std::uint64_t generation = first_generation_ + std::uint64_t(piece_);
  switch (phase_) {
  case Phase::lead:
    for (const std::int32_t q : comm_.window_readers[first_generation_ & 1])
      progress(std::size_t(q), progress_word(first_generation_ - 1, 0));
    break;
  case Phase::arrive:
    for (std::size_t q = 0; q < comm_.size(); ++q)
      if (comm_.layout().block(q).headers[seq & 1].seq.load() != seq)
        open.push_back({q, true, seq});
    break;
  case Phase::generations:
    if (!free_) {
      for (const std::int32_t q : comm_.window_readers[generation & 1])
        progress(std::size_t(q), progress_word(generation - 1, 0));
    } else if (action_ < program_->actions.size()) {
      const Program::Action &action = program_->actions[action_];
      for (auto w = action.first_wait; w < action.end_wait; ++w) {
        const auto &wait = program_->waits[std::size_t(w)];
        progress(std::size_t(wait.rank), progress_word(generation, std::uint64_t(wait.count)));
      }
    }
    break;
  case Phase::exit:
    for (const auto &wait : program_->exits)
      progress(std::size_t(wait.rank),
               progress_word(first_generation_ + std::uint64_t(plan_->pieces) - 1,
                             std::uint64_t(wait.count)));
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
