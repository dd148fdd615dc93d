// What a collective that is blocked needs, and of whom. Nothing here changes what it does.

#include "engine/collective.hpp"
#include "engine/comm.hpp"

namespace unisono {

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
