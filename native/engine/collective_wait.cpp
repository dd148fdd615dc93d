// What a blocked collective waits for, and from which ranks. Nothing here changes its
// state.

#include "engine/collective.hpp"
#include "engine/comm.hpp"

namespace unisono {

bool Collective::depends_on(std::size_t rank) const {
  if (rank == unreachable_)
    return true;
  if (comm_.is_remote(rank))
    return phase_ != Phase::begin && has_stream_traffic(rank);
  // Before all have arrived the number of generations is not known.
  const bool settled = phase_ != Phase::lead && phase_ != Phase::arrive;
  const std::uint64_t end = settled ? comm_.generation : first_generation_ + 1;
  return phase_ != Phase::begin &&
         comm_.layout().block(rank).progress.load(std::memory_order_acquire) <
             progress_word(end, 0);
}

std::vector<Need> Collective::needs() const {
  std::vector<Need> open;
  if (unreachable_ != no_rank)
    return {{unreachable_, true, seq + 1}};
  const auto awaits = [&](const Program::Wait &wait, std::uint64_t generation) {
    const auto q = std::size_t(wait.rank);
    const std::uint64_t word = progress_word(generation, std::uint64_t(wait.count));
    if (comm_.is_remote(q)) {
      if (!messages_sent(wait, generation))
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
    for (const std::size_t q : comm_.local_ranks())
      if (comm_.layout().block(q).headers[seq & 1].seq.load() != seq)
        open.push_back({q, true, seq});
    break;
  case Phase::generations:
    if (!window_free_) {
      for (const std::int32_t q : comm_.window_readers[generation & 1])
        awaits({q, 0}, generation - 1);
    } else if (awaited_sender_ != no_rank) {
      open.push_back({awaited_sender_, true, ~std::uint64_t(0)});
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
  if (open.empty()) // a descriptor has not arrived
    for (std::size_t q = 0; q < comm_.size(); ++q)
      if (q != comm_.rank() && depends_on(q))
        open.push_back({q, true, seq});
  return open;
}

} // namespace unisono
