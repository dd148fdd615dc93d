// Which buffers a collective uses where they lie: what this rank lends to the others, what
// all of them lend, and where that is found.

#include <cstring>

#include "engine/collective.hpp"
#include "engine/comm.hpp"
#include "memory/host_peers.hpp"

namespace unisono {

// Says which buffers others may reach, unless a call has failed: then one who is slow may
// still read what this header held two calls ago. A buffer of no bytes, which nobody reads,
// may as well be lent.
void Collective::lend() {
  if (!plan_->may_lend || (lent_ != 0 && comm_.here().size() == 1))
    return;
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

} // namespace unisono
