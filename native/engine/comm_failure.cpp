// What a communicator finds wrong, tells others of, and hears from them.
//
// Within a host a verdict is a word that all see. Across hosts it travels by the lifeline,
// together with what explains it: what the ranks had called whose calls differ, who has
// closed, and who waits for whom.

#include "engine/comm.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include <unistd.h>

#include "net/lifeline.hpp"

namespace unisono {

namespace {

// A note that others may read while it is written: they look at its number before and
// after. Several may write it, but only the same.
void put(Note &to, const Note &note) {
  std::atomic_ref(to.seq).store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(reinterpret_cast<std::byte *>(&to) + sizeof to.seq,
              reinterpret_cast<const std::byte *>(&note) + sizeof note.seq,
              sizeof note - sizeof note.seq);
  std::atomic_ref(to.seq).store(note.seq, std::memory_order_release);
}

std::uint64_t get_seq(const Note &note) {
  std::atomic_thread_fence(std::memory_order_acquire);
  const auto seq =
      std::atomic_ref(const_cast<Note &>(note).seq).load(std::memory_order_acquire);
  return seq;
}

// A copy of such a note; its number is 0 if it was written meanwhile.
Note get(const Note &note) {
  const std::uint64_t seq = get_seq(note);
  Note copy = note;
  copy.seq = get_seq(note) == seq ? seq : 0;
  return copy;
}

} // namespace

// Tells other hosts that this rank has left, and why if it is because of a verdict: who
// found that may have told it to the hub, and the hub be leaving before it has heard.
void Comm::say_goodbye() {
  const Verdict why = verdict();
  if (why.trouble == Trouble::mismatch)
    for (const std::size_t q : {std::size_t(why.culprit), std::size_t(why.reporter)})
      if (const Note &note = layout_.block(q).differing; std::uint32_t(note.seq) == why.seq)
        (void)engine_.lifeline->tell_called(agreed_, world_rank(q), note);
  if (why.trouble != Trouble::none)
    (void)engine_.lifeline->tell_verdict(agreed_, why.word());
  (void)engine_.lifeline->tell_closed(agreed_);
}

std::size_t Comm::dead() const {
  std::size_t q = 0;
  while (q < size() && !mesh().dead(world_rank(q)))
    ++q;
  return q;
}

// Shows all what the two ranks had called whose calls differ, as far as it is known here.
void Comm::accuse(const Verdict &verdict) {
  for (const std::size_t q : {std::size_t(verdict.culprit), rank_}) {
    Note note = get(layout_.block(q).notes[verdict.seq & 1]);
    if (far(q) && std::uint32_t(note.seq) != verdict.seq)
      note = inlets_[q]->note();
    if (std::uint32_t(note.seq) != verdict.seq)
      continue; // it will answer
    layout_.block(q).differing = note;
    if (!far_.empty() && engine_.lifeline)
      (void)engine_.lifeline->tell_called(agreed_, world_rank(q), note);
  }
}

Verdict Comm::condemn(Verdict verdict) {
  std::uint64_t found = 0;
  if (verdict.trouble == Trouble::mismatch && verdict.reporter == rank_ &&
      this->verdict().trouble == Trouble::none)
    accuse(verdict);
  Word &abort = layout_.control().abort;
  if (abort.compare_exchange_strong(found, verdict.word(), std::memory_order_acq_rel)) {
    found = verdict.word();
    if (!far_.empty() && engine_.lifeline)
      (void)engine_.lifeline->tell_verdict(agreed_, found);
  }
  ring(layout_, size());
  return Verdict::of(found);
}

void Comm::hear(const Event &event) {
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
  case Event::Kind::verdict: {
    const Verdict verdict = believed(Verdict::of(event.word), rank);
    layout_.control().abort.compare_exchange_strong(none, verdict.word(),
                                                    std::memory_order_acq_rel);
    answer(verdict);
    break;
  }
  case Event::Kind::waits:
    if (far(rank)) {
      Note note;
      std::memcpy(&note, event.note.data(), sizeof note);
      put(layout_.block(rank).notes[note.seq & 1], note);
      block.needs.store(~std::uint64_t(0), std::memory_order_relaxed);
      block.waits_for.store(event.word, std::memory_order_release);
    }
    break;
  case Event::Kind::closed:
    if (far(rank))
      block.left.compare_exchange_strong(none, std::uint64_t(now_ns()),
                                         std::memory_order_acq_rel);
    break;
  default:
    break;
  }
  ring(layout_, size());
}

Verdict Comm::believed(const Verdict &verdict, std::size_t from) const {
  const bool known = verdict.trouble > Trouble::none && verdict.trouble <= last_trouble;
  if (known && verdict.culprit < size() && verdict.reporter < size())
    return verdict;
  return {Trouble::corrupted, std::uint32_t(from), std::uint32_t(rank_), verdict.seq};
}

void Comm::tell_connecting(std::size_t rank, bool lasts) {
  RankBlock &mine = layout_.block(rank_);
  const std::uint64_t word = rank == rank_ ? 0 : (rank + 1) | std::uint64_t(1) << 32;
  mine.needs.store(~std::uint64_t(0), std::memory_order_relaxed);
  mine.waits_for.store(word, std::memory_order_release);
  mine.looked.store(std::uint64_t(now_ns()), std::memory_order_release);
  if (lasts && !far_.empty() && engine_.lifeline)
    (void)engine_.lifeline->tell_waits(agreed_, word, Note{});
}

// Whoever found our call to differ may not know what it was.
void Comm::answer(const Verdict &verdict) {
  const Note &note = layout_.block(rank_).notes[verdict.seq & 1];
  if (verdict.trouble == Trouble::mismatch && verdict.culprit == rank_ &&
      std::uint32_t(note.seq) == verdict.seq && engine_.lifeline)
    (void)engine_.lifeline->tell_called(agreed_, world_rank(rank_), note);
}

// Whether a rank of another host has said that it waits in this very call, but calls it by
// another name.
bool Comm::calls_otherwise(std::size_t rank, std::uint64_t seq) const {
  const Note &theirs = layout_.block(rank).notes[seq & 1];
  const Note &mine = layout_.block(rank_).notes[seq & 1];
  return far(rank) && get_seq(theirs) == seq && mine.seq == seq &&
         std::memcmp(&theirs, &mine, sizeof mine) != 0 && get_seq(theirs) == seq;
}

// Whether `op` can get nothing more from a rank that has closed its end. One of another
// host may have sent what is still on its way: if there is a stream, that tells its end,
// and if there is none it may be about to be attached.
bool Comm::has_left(std::size_t rank, const Task &op) const {
  const std::uint64_t left = layout_.block(rank).left.load(std::memory_order_acquire);
  if (left == 0 || !far(rank))
    return left != 0;
  return !(op.breaks_all && inlets_[rank]->open()) &&
         now_ns() - std::int64_t(left) > on_its_way;
}

bool Comm::doomed(Task &op) {
  const auto fails = [&](Verdict verdict, bool for_all) {
    op.verdict = for_all ? condemn(verdict) : verdict;
    return true;
  };
  const Verdict broken = verdict();
  if (broken.trouble != Trouble::none)
    return fails(broken, false);
  const auto seq32 = std::uint32_t(op.seq);
  const auto me = std::uint32_t(rank_);
  if (mesh().dead(world_rank(rank_))) // so the others say, who heard nothing of it for long
    return fails({Trouble::peer_lost, me, me, seq32}, op.breaks_all);
  if (closed()) // by another thread
    return fails({Trouble::left, me, me, seq32}, op.breaks_all);
  if (mesh().starved())
    return fails({Trouble::starved, me, me, seq32}, op.breaks_all);
  for (std::size_t q = 0; q < size(); ++q) {
    if (q == rank_)
      continue;
    const bool dead = mesh().dead(world_rank(q)), left = has_left(q, op);
    if (op.breaks_all && calls_otherwise(q, op.seq))
      return fails({Trouble::mismatch, std::uint32_t(q), me, seq32}, true);
    // Across hosts nobody sees who else is held up by a death, and if it is the hub's nobody
    // will be told: so it ends the calls of all. Not the death of one who had closed its end
    // before, having done its part.
    // So it is with a message to or from another host when the hub has died: the death of
    // its other end would not be heard.
    const bool unheard = op.breaks_all || (world_rank(q) == 0 && op.crosses_hosts());
    const bool ends_all = dead && unheard && !far_.empty() &&
                          layout_.block(q).left.load(std::memory_order_acquire) == 0;
    if ((dead || left) && (ends_all || op.hindered_by(q)))
      return fails({left ? Trouble::left : Trouble::peer_lost, std::uint32_t(q), me, seq32},
                   op.breaks_all);
  }
  const std::int64_t now = now_ns();
  if (op.breaks_all) {
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
  tell_waiting(op, waited);
  if (op.timeout > 0 && waited >= op.timeout) {
    const auto late = op.missed = culprits(op);
    return fails({Trouble::timeout, std::uint32_t(late.empty() ? rank_ : late[0]), me, seq32},
                 op.breaks_all);
  }
  if (!op.warned && late_after > 0 && waited >= late_after) {
    op.warned = true;
    warn(op, waited);
  }
  return false;
}

// A rank that slept while the others ended this call, and failed in a later one, looks once
// more before it takes their verdict for its own: all it waited for may be there.
Status Comm::judge(Task &op) {
  if (!doomed(op))
    return Status::blocked;
  const bool later =
      op.breaks_all && std::int32_t(op.verdict.seq - std::uint32_t(op.seq)) > 0;
  return later && step(op) == Status::done ? Status::done : Status::failed;
}

// Tells other hosts whom this rank has been waiting for, so that they do not take it for
// the one that is late; in time, before anybody loses patience.
void Comm::tell_waiting(Task &op, std::int64_t waited) {
  if (far_.empty() || !op.breaks_all || !engine_.lifeline)
    return;
  std::int64_t patience = late_after > 0 ? late_after : op.timeout;
  if (op.timeout > 0)
    patience = std::min(patience, op.timeout);
  const bool long_enough = patience > 0 && waited >= patience / 4;
  const std::uint64_t word =
      long_enough ? layout_.block(rank_).waits_for.load(std::memory_order_relaxed) : 0;
  if (word == op.told_waiting)
    return;
  op.told_waiting = word;
  (void)engine_.lifeline->tell_waits(agreed_, word, layout_.block(rank_).notes[op.seq & 1]);
}

// Follows who waits for whom to one that could go on, but does not; or that has not looked
// up since `since`, for what it waits for may have come.
std::size_t Comm::culprit(std::size_t rank, std::int64_t since) const {
  for (std::size_t steps = 0; steps < size(); ++steps) {
    const RankBlock &block = layout_.block(rank);
    // Written in the other order: whoever has looked up has said for whom it waits, and
    // whoever has said that has said what it needs.
    const std::uint64_t looked = block.looked.load(std::memory_order_acquire);
    const std::uint64_t waits_for = block.waits_for.load(std::memory_order_acquire);
    if (waits_for == 0)
      return rank;
    if (!far(rank) && std::int64_t(looked) < since)
      return rank;
    const auto next = std::size_t(waits_for & 0xffffffff) - 1;
    if (next >= size() || next == rank_)
      return rank;
    const std::uint64_t needs = block.needs.load(std::memory_order_relaxed);
    const RankBlock &other = layout_.block(next);
    const bool came = waits_for >> 32 ? std::max(other.headers[0].seq.load(),
                                                 other.headers[1].seq.load()) >= needs
                                      : other.progress.load() >= needs;
    if (came)
      return rank;
    rank = next;
  }
  return rank;
}

std::vector<std::size_t> Comm::culprits(const Task &op) const {
  std::vector<std::size_t> found;
  const std::int64_t now = now_ns();
  const std::int64_t since = op.waiting_since ? now - (now - op.waiting_since) / 2 : 0;
  for (const Need &need : op.needs()) {
    const std::size_t q = op.breaks_all ? culprit(need.rank, since) : need.rank;
    if (std::find(found.begin(), found.end(), q) == found.end())
      found.push_back(q);
  }
  std::sort(found.begin(), found.end());
  return found;
}

// One write, so that lines of several ranks do not mix.
void Comm::warn(const Task &op, std::int64_t waited) const {
  static const char *const names[] = {"broadcast", "scatter", "gather", "reduce",
                                      "all_gather", "reduce_scatter", "all_reduce",
                                      "all_to_all", "barrier", "send", "recv"};
  std::string who;
  for (std::size_t q : culprits(op))
    who += (who.empty() ? "" : ", ") + std::to_string(q);
  const std::size_t kind = op.record ? op.record->note.collective : 0;
  char text[512];
  const int length = std::snprintf(
      text, sizeof text, "unisono: rank %zu has waited %.0f s in %s (seq %llu) for rank %s\n",
      rank_, double(waited) / 1e9, kind < std::size(names) ? names[kind] : "?",
      static_cast<unsigned long long>(op.seq), who.c_str());
  if (length > 0)
    (void)!::write(2, text, std::min(std::size_t(length), sizeof text - 1));
}

} // namespace unisono
