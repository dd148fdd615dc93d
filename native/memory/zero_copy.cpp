#include "memory/zero_copy.hpp"

#include <algorithm>

#include <sched.h>

#include "support/clock.hpp"

namespace unisono {

ZeroCopy::ZeroCopy(std::shared_ptr<HostPeers> host_peers, const Layout &layout,
                 std::vector<std::size_t> ranks, std::vector<std::size_t> local_ranks,
                 std::size_t rank, std::uint64_t id)
    : host_peers_(std::move(host_peers)), layout_(layout), ranks_(std::move(ranks)),
      local_ranks_(std::move(local_ranks)), rank_(rank),
      probe_(id ^ std::uint64_t(rank) << 48 ^ std::uint64_t(now_ns())) {
  RankBlock &mine = layout_.block(rank_);
  mine.probe_value.store(probe_, std::memory_order_relaxed);
  mine.probe_at.store(reinterpret_cast<std::uintptr_t>(&probe_), std::memory_order_release);
}

ZeroCopy::Access ZeroCopy::test_access() {
  if (access_ != untested || host_peers_->between_threads())
    return access_;
  Word &mine = layout_.block(rank_).access;
  bool all = true;
  for (const std::size_t q : local_ranks_) {
    if (mine.load() != untested)
      break;
    const RankBlock &block = layout_.block(q);
    const std::uint64_t at = block.probe_at.load(std::memory_order_acquire);
    if (at == 0)
      return untested; // that rank has not published its probe
    std::uint64_t found = 0;
    const PeerAddress probe{reinterpret_cast<std::byte *>(at), host_peers_->pid(ranks_[q])};
    if (q != rank_) // a rank in another pid namespace cannot be accessed
      all = all && probe.pid > 0 &&
            copy_from_peer(reinterpret_cast<std::byte *>(&found), probe, sizeof found) &&
            found == block.probe_value.load(std::memory_order_relaxed);
  }
  if (mine.load() == untested)
    mine.store(all ? granted : denied, std::memory_order_release);
  Access shared_id = granted;
  for (const std::size_t q : local_ranks_) {
    const std::uint64_t access = layout_.block(q).access.load(std::memory_order_acquire);
    if (access == untested)
      return untested;
    shared_id = access == denied ? denied : shared_id;
  }
  return access_ = shared_id;
}

bool ZeroCopy::accessible(const std::byte *data, std::size_t bytes, bool for_writing) {
  const std::pair what{data, bytes * 2 + for_writing};
  if (std::find(accessible_.begin(), accessible_.end(), what) != accessible_.end())
    return true;
  if (!unisono::accessible(const_cast<std::byte *>(data), bytes, for_writing))
    return false;
  if (accessible_.size() == 16)
    accessible_.erase(accessible_.begin());
  accessible_.push_back(what);
  return true;
}

// Both sides store, then load: at least one of them sees the other.
ZeroCopy::WriteGuard::WriteGuard(const ZeroCopy &zero_copy, std::uint64_t seq,
                                 bool really) {
  if (!really)
    return;
  writing_ = &zero_copy.layout_.block(zero_copy.rank_).writing;
  writing_->store(1, std::memory_order_seq_cst);
  const std::uint64_t word =
      zero_copy.layout_.control().abort.load(std::memory_order_seq_cst);
  allowed_ = !Failure::of(word).ends(seq);
}

ZeroCopy::WriteGuard::~WriteGuard() {
  if (writing_ != nullptr)
    writing_->store(0, std::memory_order_release);
}

// A rank that has given up a call takes part in no other: the first is kept. A call that has
// not begun has no number, and no rank uses its buffers.
void ZeroCopy::give_up(std::uint64_t seq) const {
  std::uint64_t none = 0;
  layout_.block(rank_).given_up.compare_exchange_strong(none, seq, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const std::int64_t until = now_ns() + 1'000'000'000;
       has_writers() && now_ns() < until;)
    ::sched_yield();
}

bool ZeroCopy::given_up(std::uint64_t seq) const {
  for (const std::size_t q : local_ranks_) {
    const std::uint64_t first = layout_.block(q).given_up.load(std::memory_order_relaxed);
    if (first != 0 && first <= seq)
      return true;
  }
  return false;
}

bool ZeroCopy::has_writers() const {
  for (const std::size_t q : local_ranks_)
    if (q != rank_ && layout_.block(q).writing.load(std::memory_order_seq_cst) != 0 &&
        // a stopped rank may be silent, and continue to write later
        !host_peers_->ended(ranks_[q]))
      return true;
  return false;
}

std::byte *ZeroCopy::scratch(std::size_t bytes) {
  const std::size_t room = bytes + line_size;
  if (scratch_.size() < room)
    scratch_.resize(room);
  const auto at = reinterpret_cast<std::uintptr_t>(scratch_.data());
  return scratch_.data() + (line_size - at % line_size) % line_size;
}

} // namespace unisono
