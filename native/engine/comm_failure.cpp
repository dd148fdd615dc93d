// How a communicator detects failures, announces them, and learns of them.
//
// Within a host a failure is one word in shared memory. Between hosts it is sent over the
// lifeline, together with what explains it: the calls of the ranks whose calls differ,
// which ranks have closed, and which rank waits for which.

#include "engine/comm.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

#include <unistd.h>

#include "net/lifeline.hpp"

namespace unisono {

namespace {

// A note that is written while others may read it: word by word, and readers compare its
// sequence number before and after. Several ranks may write it, all with the same content; so
// a reader must not use the number that it finds in between.
using NoteWord [[gnu::may_alias]] = std::uint64_t;
constexpr std::size_t note_words = sizeof(Note) / sizeof(NoteWord);
static_assert(offsetof(Note, seq) == 0 && sizeof(Note::seq) == sizeof(NoteWord));

void put(Note &to, const Note &note) {
  auto *const words = reinterpret_cast<NoteWord *>(&to);
  const auto *const from = reinterpret_cast<const NoteWord *>(&note);
  __atomic_store_n(words, 0, __ATOMIC_RELAXED);
  std::atomic_thread_fence(std::memory_order_release);
  for (std::size_t i = 1; i < note_words; ++i)
    __atomic_store_n(words + i, from[i], __ATOMIC_RELAXED);
  __atomic_store_n(words, note.seq, __ATOMIC_RELEASE);
}

std::uint64_t get_seq(const Note &note) {
  return std::atomic_ref(const_cast<Note &>(note).seq).load(std::memory_order_acquire);
}

// A copy of such a note; its sequence number is 0 if it was written meanwhile.
Note get(const Note &note) {
  const std::uint64_t seq = get_seq(note);
  const auto *const words = reinterpret_cast<const NoteWord *>(&note);
  Note copy;
  for (std::size_t i = 1; i < note_words; ++i)
    reinterpret_cast<NoteWord *>(&copy)[i] = __atomic_load_n(words + i, __ATOMIC_RELAXED);
  std::atomic_thread_fence(std::memory_order_acquire);
  copy.seq = get_seq(note) == seq ? seq : 0;
  return copy;
}

} // namespace

// Tells other hosts that this rank has closed, and the failure if there is one: the rank
// that detected it may have told only rank 0, and rank 0 may close before it has received
// that.
void Comm::announce_closing() {
  const Failure why = failure();
  if (why.kind == FailureKind::mismatch)
    for (const std::size_t q : {std::size_t(why.culprit), std::size_t(why.reporter)})
      if (const Note &note = layout_.block(q).differing; std::uint32_t(note.seq) == why.seq)
        (void)engine_.lifeline->announce_call(shared_id_, world_rank(q), note);
  if (why.kind != FailureKind::none)
    (void)engine_.lifeline->announce_failure(shared_id_, why.word());
  (void)engine_.lifeline->announce_close(shared_id_);
}

bool Comm::has_left(std::size_t rank) const {
  return layout_.block(rank).closed.load(std::memory_order_acquire) != 0;
}

std::size_t Comm::first_dead() const {
  std::size_t q = 0;
  while (q < size() && (!host_peers().dead(world_rank(q)) || has_left(q)))
    ++q;
  return q;
}

// Publishes the calls of the two ranks whose calls differ, as far as they are known here.
void Comm::publish_mismatch(const Failure &failure) {
  for (const std::size_t q : {std::size_t(failure.culprit), rank_}) {
    // A rank of this host that has arrived writes no other note before it has failed, too.
    const Note &shared = layout_.block(q).notes[failure.seq & 1];
    Note note = is_remote(q) ? get(shared) : shared;
    if (is_remote(q) && std::uint32_t(note.seq) != failure.seq)
      note = receive_streams_[q]->note();
    if (std::uint32_t(note.seq) != failure.seq)
      continue; // that rank announces it itself
    layout_.block(q).differing = note;
    if (!remote_.empty() && engine_.lifeline)
      (void)engine_.lifeline->announce_call(shared_id_, world_rank(q), note);
  }
}

Failure Comm::abort(Failure failure) {
  if (failure.kind == FailureKind::mismatch && failure.reporter == rank_ &&
      !this->failure().ends(failure.seq))
    publish_mismatch(failure);
  return set_failure(failure);
}

Failure Comm::abort_mismatch(Failure failure, const Note &theirs, const Note &mine) {
  if (this->failure().kind == FailureKind::none) {
    layout_.block(failure.culprit).differing = theirs;
    layout_.block(rank_).differing = mine;
  }
  return set_failure(failure);
}

void Comm::describe_differing(const Note &mine) {
  Note &published = layout_.block(rank_).differing;
  if (published.seq != mine.seq || published.lengths[Note::algorithm] == 0)
    put(published, mine);
}

// Stores a failure, unless there is one that ends its call. A rank in an earlier call than the
// one that stands ends does not see that: so a failure of its call replaces it.
bool Comm::store_failure(const Failure &failure, std::uint64_t &found) {
  Word &abort = layout_.control().abort;
  for (found = 0; !Failure::of(found).ends(failure.seq);)
    if (abort.compare_exchange_strong(found, failure.word(), std::memory_order_acq_rel)) {
      found = failure.word();
      return true;
    }
  return false;
}

Failure Comm::set_failure(Failure failure) {
  std::uint64_t found;
  if (store_failure(failure, found) && !remote_.empty() && engine_.lifeline)
    (void)engine_.lifeline->announce_failure(shared_id_, found);
  wake_sleepers(layout_, size());
  return Failure::of(found);
}

void Comm::handle_event(const Event &event) {
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
  case Event::Kind::failure: {
    const Failure failure = validated(Failure::of(event.word), rank);
    std::uint64_t found;
    store_failure(failure, found);
    announce_own_call(failure);
    break;
  }
  case Event::Kind::waits:
    if (is_remote(rank)) {
      Note note;
      std::memcpy(&note, event.note.data(), sizeof note);
      put(layout_.block(rank).notes[note.seq & 1], note);
      block.needs.store(~std::uint64_t(0), std::memory_order_relaxed);
      block.waits_for.store(event.word, std::memory_order_release);
      block.looked.store(std::uint64_t(now_ns()), std::memory_order_release);
    }
    break;
  case Event::Kind::closed:
    if (is_remote(rank))
      block.closed.compare_exchange_strong(none, std::uint64_t(now_ns()),
                                         std::memory_order_acq_rel);
    break;
  default:
    break;
  }
  wake_sleepers(layout_, size());
}

Failure Comm::validated(const Failure &failure, std::size_t from) const {
  const bool known = failure.kind > FailureKind::none && failure.kind <= last_failure_kind;
  if (known && failure.culprit < size() && failure.reporter < size())
    return failure;
  return {FailureKind::corrupted, std::uint32_t(from), std::uint32_t(rank_), failure.seq};
}

void Comm::announce_connecting(std::size_t rank, bool lasts) {
  RankBlock &mine = layout_.block(rank_);
  const std::uint64_t word = rank == rank_ ? 0 : (rank + 1) | std::uint64_t(1) << 32;
  mine.needs.store(~std::uint64_t(0), std::memory_order_relaxed);
  mine.waits_for.store(word, std::memory_order_release);
  mine.looked.store(std::uint64_t(now_ns()), std::memory_order_release);
  if (lasts && !remote_.empty() && engine_.lifeline)
    (void)engine_.lifeline->announce_wait(shared_id_, word, Note{});
}

// The rank that detected the mismatch may not know what this rank called.
void Comm::announce_own_call(const Failure &failure) {
  const Note &note = layout_.block(rank_).notes[failure.seq & 1];
  if (failure.kind == FailureKind::mismatch && failure.culprit == rank_ &&
      std::uint32_t(note.seq) == failure.seq && engine_.lifeline)
    (void)engine_.lifeline->announce_call(shared_id_, world_rank(rank_), note);
}

// Whether a rank of another host has announced that it waits in this call number, but in a
// different call.
bool Comm::called_differently(std::size_t rank, std::uint64_t seq) const {
  const Note &shared = layout_.block(rank).notes[seq & 1];
  const Note &mine = layout_.block(rank_).notes[seq & 1];
  if (!is_remote(rank) || get_seq(shared) != seq || mine.seq != seq)
    return false;
  const Note theirs = get(shared);
  return theirs.seq == seq && std::memcmp(&theirs, &mine, sizeof mine) != 0;
}

// Whether `op` can receive nothing more from a rank that has closed. Data from another host
// may still be in flight: an attached stream ends with a close frame, and without a stream
// one may be about to be attached.
bool Comm::has_closed(std::size_t rank, const Task &op) const {
  const std::uint64_t closed_at =
      layout_.block(rank).closed.load(std::memory_order_acquire);
  if (closed_at == 0 || !is_remote(rank))
    return closed_at != 0;
  return !(op.expects_data_of(rank) && receive_streams_[rank]->open()) &&
         now_ns() - std::int64_t(closed_at) > attach_grace;
}

Failure Comm::find_failure(Task &op) {
  // Messages have no place in the order of calls: every failure ends them.
  if (const Failure broken = failure();
      op.aborts_comm ? broken.ends(op.seq) : broken.kind != FailureKind::none)
    return broken;
  const auto seq32 = std::uint32_t(op.seq);
  const auto me = std::uint32_t(rank_);
  if (host_peers().dead(
          world_rank(rank_))) // so the others say, who heard nothing of it for long
    return {FailureKind::peer_lost, me, me, seq32};
  if (closed()) // by another thread
    return {FailureKind::closed, me, me, seq32};
  if (host_peers().out_of_resources())
    return {FailureKind::out_of_resources, me, me, seq32};
  for (std::size_t q = 0; q < size(); ++q) {
    if (q == rank_)
      continue;
    // Read in this order: a rank that leaves announces that before its process ends.
    const bool dead = host_peers().dead(world_rank(q)), died = dead && !has_left(q);
    const bool closed = has_closed(q, op);
    if (op.aborts_comm && called_differently(q, op.seq))
      return {FailureKind::mismatch, std::uint32_t(q), me, seq32};
    // Between hosts a rank cannot see which others depend on a dead rank, and after the
    // death of rank 0 no rank announces deaths. So a death aborts the calls of all, unless
    // the dead rank had closed before. The same holds for a message between hosts after the
    // death of rank 0: the death of its peer would not be announced.
    const bool unreported = op.aborts_comm || (world_rank(q) == 0 && op.crosses_hosts());
    const bool ends_all = died && unreported && !remote_.empty();
    if ((dead || closed) && (ends_all || op.depends_on(q)))
      return {died ? FailureKind::peer_lost : FailureKind::closed, std::uint32_t(q), me,
              seq32};
  }
  const std::int64_t now = now_ns();
  if (op.aborts_comm) {
    const auto open = op.needs();
    RankBlock &mine = layout_.block(rank_);
    mine.needs.store(open.empty() ? 0 : open[0].word, std::memory_order_relaxed);
    mine.waits_for.store(open.empty() ? 0
                                      : (open[0].rank + 1) | std::uint64_t(open[0].arrival) << 32,
                         std::memory_order_release);
    mine.looked.store(std::uint64_t(now), std::memory_order_release);
  }
  if (op.waiting_since == 0)
    op.waiting_since = now;
  const std::int64_t waited = now - op.waiting_since;
  announce_wait(op, waited);
  if (op.timeout > 0 && waited >= op.timeout) {
    const auto late = op.late_ranks = blocking_ranks(op);
    return {FailureKind::timeout, std::uint32_t(late.empty() ? rank_ : late[0]), me, seq32};
  }
  if (!op.warned && late_after > 0 && waited >= late_after) {
    op.warned = true;
    warn(op, waited);
  }
  return {};
}

// Whether a call may have all that it waited for, although there is a failure: this rank may
// have slept while the others completed the call, and failed or ended after it. Not if calls
// differ: a call that some ranks have not made is completed by none.
bool Comm::may_be_complete(const Task &op, const Failure &failure) const {
  if (failure.kind == FailureKind::mismatch)
    return op.aborts_comm && std::int32_t(failure.seq - std::uint32_t(op.seq)) > 0;
  return !closed();
}

// Tries once more before it fails. What the failure was found from has been read before
// that: so the data of a rank that is seen to be dead is used as far as it has arrived.
Status Comm::check_blocked(Task &op) {
  const Failure found = find_failure(op);
  if (found.kind == FailureKind::none)
    return Status::blocked;
  if (may_be_complete(op, found)) {
    op.recall(); // so that one attempt uses all that has arrived
    if (const Status status = step(op); status != Status::blocked)
      return status;
  }
  op.failure = op.aborts_comm ? abort(found) : found;
  return Status::failed;
}

// Announces to other hosts which rank this one waits for, so that they do not report it as
// late; well before their own limits.
void Comm::announce_wait(Task &op, std::int64_t waited) {
  if (remote_.empty() || !op.aborts_comm || !engine_.lifeline)
    return;
  std::int64_t limit = late_after > 0 ? late_after : op.timeout;
  if (op.timeout > 0)
    limit = std::min(limit, op.timeout);
  const bool long_enough = limit > 0 && waited >= limit / 4;
  const std::uint64_t word =
      long_enough ? layout_.block(rank_).waits_for.load(std::memory_order_relaxed) : 0;
  if (word == op.announced_wait)
    return;
  op.announced_wait = word;
  (void)engine_.lifeline->announce_wait(shared_id_, word,
                                        layout_.block(rank_).notes[op.seq & 1]);
}

// Follows the chain of waits to a rank that could proceed but does not, or that has not
// published its wait since `since`, for what it waited for may have arrived.
std::size_t Comm::follow_waits(std::size_t rank, std::int64_t since) const {
  std::vector<std::size_t> chain;
  while (true) {
    const RankBlock &block = layout_.block(rank);
    // Read in the reverse order of the stores: `looked` is stored after `waits_for`, and
    // that after `needs`.
    const std::uint64_t looked = block.looked.load(std::memory_order_acquire);
    const std::uint64_t waits_for = block.waits_for.load(std::memory_order_acquire);
    if (waits_for == 0)
      return rank;
    if (!is_remote(rank) && std::int64_t(looked) < since)
      return rank;
    const auto next = std::size_t(waits_for & 0xffffffff) - 1;
    if (next >= size())
      return rank;
    const std::uint64_t needs = block.needs.load(std::memory_order_relaxed);
    const RankBlock &other = layout_.block(next);
    const bool came = waits_for >> 32 ? std::max(other.headers[0].seq.load(),
                                                 other.headers[1].seq.load()) >= needs
                                      : other.progress.load() >= needs;
    if (came)
      return rank;
    chain.push_back(rank);
    const auto circle =
        next == rank_ ? chain.begin() : std::find(chain.begin(), chain.end(), next);
    if (circle != chain.end())
      return longest_unchanged({circle, chain.end()});
    rank = next;
  }
}

// Ranks do not wait for each other in a circle: one of these has what it waited for, and
// has not announced that. Who announced its wait first is that rank; for a rank that waits
// for it can have begun to wait only later.
std::size_t Comm::longest_unchanged(const std::vector<std::size_t> &circle) const {
  return *std::min_element(circle.begin(), circle.end(), [this](auto one, auto other) {
    return layout_.block(one).looked.load(std::memory_order_acquire) <
           layout_.block(other).looked.load(std::memory_order_acquire);
  });
}

std::vector<std::size_t> Comm::blocking_ranks(const Task &op) const {
  std::vector<std::size_t> found;
  // Of a message only what does not change is read: any thread may ask for it.
  const std::int64_t now = now_ns(), began = op.aborts_comm ? op.waiting_since : 0;
  const std::int64_t since = began ? now - (now - began) / 2 : 0;
  for (const Need &need : op.needs()) {
    const std::size_t q = op.aborts_comm ? follow_waits(need.rank, since) : need.rank;
    if (std::find(found.begin(), found.end(), q) == found.end())
      found.push_back(q);
  }
  std::sort(found.begin(), found.end());
  return found;
}

// One write, so that lines of several ranks do not interleave.
void Comm::warn(const Task &op, std::int64_t waited) const {
  static const char *const names[] = {"broadcast", "scatter", "gather", "reduce",
                                      "all_gather", "reduce_scatter", "all_reduce",
                                      "all_to_all", "barrier", "send", "recv"};
  std::string who;
  for (std::size_t q : blocking_ranks(op))
    who += (who.empty() ? "" : ", ") + std::to_string(q);
  const std::size_t kind = op.record ? op.record->note.collective : 0;
  char text[512];
  const int length = std::snprintf(
      text, sizeof text, "unisono: rank %zu has waited %.0f s in %s (seq %llu) for rank %s%s\n",
      rank_, double(waited) / 1e9, kind < std::size(names) ? names[kind] : "?",
      static_cast<unsigned long long>(op.seq), who.c_str(), late_hint.c_str());
  if (length > 0)
    (void)!::write(2, text, std::min(std::size_t(length), sizeof text - 1));
}

} // namespace unisono
