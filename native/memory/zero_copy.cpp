#include "memory/zero_copy.hpp"

#include <algorithm>

#include <sched.h>

#include "support/clock.hpp"

namespace unisono {

Lending::Lending(std::shared_ptr<Mesh> mesh, const Layout &layout,
                 std::vector<std::size_t> ranks, std::vector<std::size_t> here,
                 std::size_t rank, std::uint64_t id)
    : mesh_(std::move(mesh)), layout_(layout), ranks_(std::move(ranks)),
      here_(std::move(here)), rank_(rank),
      probe_(id ^ std::uint64_t(rank) << 48 ^ std::uint64_t(now_ns())) {
  RankBlock &mine = layout_.block(rank_);
  mine.probe_value.store(probe_, std::memory_order_relaxed);
  mine.probe_at.store(reinterpret_cast<std::uintptr_t>(&probe_), std::memory_order_release);
}

Lending::Reaching Lending::reach() {
  if (reach_ != untried || mesh_->between_threads())
    return reach_;
  Word &mine = layout_.block(rank_).reaches;
  bool all = true;
  for (const std::size_t q : here_) {
    if (mine.load() != untried)
      break;
    const RankBlock &block = layout_.block(q);
    const std::uint64_t at = block.probe_at.load(std::memory_order_acquire);
    if (at == 0)
      return untried; // not there yet
    std::uint64_t found = 0;
    const Reach probe{reinterpret_cast<std::byte *>(at), mesh_->pid(ranks_[q])};
    if (q != rank_) // who is in another pid namespace is out of reach
      all = all && probe.pid > 0 &&
            fetch(reinterpret_cast<std::byte *>(&found), probe, sizeof found) &&
            found == block.probe_value.load(std::memory_order_relaxed);
  }
  if (mine.load() == untried)
    mine.store(all ? reaches : denied, std::memory_order_release);
  Reaching agreed = reaches;
  for (const std::size_t q : here_) {
    const std::uint64_t said = layout_.block(q).reaches.load(std::memory_order_acquire);
    if (said == untried)
      return untried;
    agreed = said == denied ? denied : agreed;
  }
  return reach_ = agreed;
}

bool Lending::reachable(const std::byte *data, std::size_t bytes, bool for_writing) {
  const std::pair what{data, bytes * 2 + for_writing};
  if (std::find(reachable_.begin(), reachable_.end(), what) != reachable_.end())
    return true;
  if (!unisono::reachable(const_cast<std::byte *>(data), bytes, for_writing))
    return false;
  if (reachable_.size() == 16)
    reachable_.erase(reachable_.begin());
  reachable_.push_back(what);
  return true;
}

// Both sides store, then look: at least one of them sees the other.
Lending::Touch::Touch(const Lending &lending, bool really) {
  if (!really)
    return;
  touching_ = &lending.layout_.block(lending.rank_).touching;
  touching_->store(1, std::memory_order_seq_cst);
  allowed_ = lending.layout_.control().abort.load(std::memory_order_seq_cst) == 0;
}

Lending::Touch::~Touch() {
  if (touching_ != nullptr)
    touching_->store(0, std::memory_order_release);
}

void Lending::hands_off() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const std::int64_t until = now_ns() + 1'000'000'000; touched() && now_ns() < until;)
    ::sched_yield();
}

bool Lending::touched() const {
  for (const std::size_t q : here_)
    if (q != rank_ && layout_.block(q).touching.load(std::memory_order_seq_cst) != 0 &&
        !mesh_->ended(ranks_[q])) // a silent one may be stopped, and write on
      return true;
  return false;
}

std::byte *Lending::scrap(std::size_t bytes) {
  const std::size_t room = bytes + line_size;
  if (scrap_.size() < room)
    scrap_.resize(room);
  const auto at = reinterpret_cast<std::uintptr_t>(scrap_.data());
  return scrap_.data() + (line_size - at % line_size) % line_size;
}

} // namespace unisono
