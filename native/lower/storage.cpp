#include "lower/storage.hpp"

#include <algorithm>
#include <utility>

namespace unisono::lowering {

Storage::Storage(Versions &versions, Shared shared)
    : mine(static_cast<std::size_t>(versions.input().n)), acts(mine.size()),
      versions_(versions) {
  for (Index v = 0; v < versions.size(); ++v)
    settle(v, shared);
  if (shared.output)
    deliver_copies(shared);
  for (Index v = 0; v < versions.size(); ++v)
    mine[static_cast<std::size_t>(versions.at(v).rank)].push_back(v);
  for (std::size_t rank = 0; rank < mine.size(); ++rank) {
    place(mine[rank]);
    number(rank);
  }
}

// A place in a window, the output, or both. Where a slot is read and overwritten in one
// step, its old value must be kept elsewhere: there is no order of the two that would do.
void Storage::settle(Index index, Shared shared) {
  Version &v = versions_.at(index);
  const bool outputs = versions_.input().has_output(v.rank, v.slot);
  const auto readers = versions_.readers(index);
  const bool exchanged = std::any_of(readers.begin(), readers.end(), [&](Index w) {
    const Version &reader = versions_.at(w);
    return reader.step == v.next_step && !versions_.is_same_slot(v, reader);
  });
  const bool can_share = v.given() ? shared.input : shared.output && outputs;
  const bool exposed = v.local_readers > 0 && can_share && !exchanged;
  const bool sent = v.remote_readers > 0 && (v.given() || outputs) && !exchanged;
  const bool needs_place = v.at_home && !outputs && !v.given();
  if (needs_place || (v.local_readers > 0 && !exposed) || (v.remote_readers > 0 && !sent))
    v.window = 0; // numbered when all is settled
  const bool kept = (v.at_home || sent) && v.window == none;
  v.output = !v.given() && outputs && (v.final || exposed || kept);
}

// The holders of an original write the copies, where that spreads the work.
void Storage::deliver_copies(Shared shared) {
  std::vector<Index> copies;
  for (Index v = 0; v < versions_.size(); ++v)
    if (is_deliverable(v))
      copies.push_back(v);
  if (!shared.input)
    std::erase_if(copies, [&](Index v) {
      return versions_.at(versions_.sources(versions_.at(v))[0]).given();
    });
  for (const Index v : shared_out(copies))
    deliver(v);
}

// Whether it only copies what another has, into a slot that nothing else reads.
bool Storage::is_deliverable(Index index) const {
  const Version &v = versions_.at(index);
  if (v.num_sources() != 1 || !v.output || v.window != none || v.at_home ||
      v.local_readers > 0 || v.remote_readers > 0)
    return false;
  const Index maker = versions_.sources(v)[0];
  const Version &made = versions_.at(maker);
  if (made.rank == v.rank || made.slot != v.slot ||
      !versions_.input().on_one_host(made.rank, v.rank))
    return false;
  for (Index u = versions_.latest(v.rank, v.slot); u != none; u = versions_.at(u).previous)
    if (u != index && !is_read_by_none_but(maker, u))
      return false;
  return true;
}

bool Storage::is_read_by_none_but(Index reader, Index v) const {
  const auto readers = versions_.readers(v);
  return !versions_.at(v).at_home && versions_.at(v).remote_readers == 0 &&
         std::all_of(readers.begin(), readers.end(),
                     [&](Index other) { return other == reader; });
}

// Which of the copies to deliver, so that the busiest rank has least to do.
std::vector<Index> Storage::shared_out(const std::vector<Index> &copies) const {
  std::vector<std::int32_t> fetched(mine.size()), delivered(mine.size()), load(mine.size());
  std::vector<Index> some;
  bool sums = true;
  for (const Index copy : copies) {
    const Version &v = versions_.at(copy), &made = versions_.at(versions_.sources(v)[0]);
    const auto holder = static_cast<std::size_t>(made.rank);
    const auto reader = static_cast<std::size_t>(v.rank);
    ++fetched[reader], ++delivered[holder];
    const bool delivers = load[holder] < load[reader];
    ++load[delivers ? holder : reader];
    if (delivers)
      some.push_back(copy);
    sums &= made.num_sources() > 1;
  }
  const auto most = [](const auto &loads) { return *std::max_element(loads.begin(), loads.end()); };
  const Load by_none{most(fetched), sums}, by_all{most(delivered), !sums};
  const Load by_some{most(load), true};
  if (by_none <= by_all && by_none <= by_some)
    return {};
  return by_all <= by_some ? copies : some;
}

void Storage::deliver(Index index) {
  Version &v = versions_.at(index);
  const Index maker = versions_.sources(v)[0];
  Version &made = versions_.at(maker);
  --made.local_readers;
  made.delivers = v.delivered = true;
  v.output = false;
  if (made.local_readers == 0 && !made.at_home && made.remote_readers == 0)
    made.window = none; // no rank reads it
}

void Storage::place(const std::vector<Index> &versions) {
  std::int32_t used = 0;
  for (const Index v : versions)
    if (versions_.at(v).window != none)
      versions_.at(v).window = used++;
  places = std::max(places, used);
}

// Inputs are published before anything else. Within a step the ranks begin with different
// peers, and with those of their own host, while messages are still on the way.
void Storage::number(std::size_t rank) {
  std::vector<std::pair<Turn, Index>> sorted;
  for (const Index v : mine[rank])
    if (const Version &one = versions_.at(v); one.window != none || one.output || one.delivers)
      sorted.emplace_back(turn(v), v);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto &a, const auto &b) { return a.first < b.first; });
  std::int32_t next = 0;
  for (const auto &[_, v] : sorted) {
    versions_.at(v).action = next++;
    acts[rank].push_back(v);
  }
}

Storage::Turn Storage::turn(Index index) const {
  const Version &v = versions_.at(index);
  const auto sources = versions_.sources(v);
  const bool arrives = std::any_of(sources.begin(), sources.end(), [&](Index s) {
    return !versions_.input().on_one_host(versions_.at(s).rank, v.rank);
  });
  std::vector<Index> readers;
  for (const Index w : versions_.readers(index))
    if (v.given() && versions_.reads_here(v, versions_.at(w)))
      readers.push_back(w);
  const std::int32_t next =
      v.given() ? nearest(versions_, v.rank, readers) : nearest(versions_, v.rank, sources);
  return {v.step, arrives, v.delivers && !arrives, next, latest_step(versions_, v), v.slot};
}

std::int32_t latest_step(const Versions &versions, const Version &v) {
  std::int32_t step = none;
  for (const Index s : versions.sources(v))
    if (versions.reads_from_other_host(versions.at(s), v))
      step = std::max(step, versions.at(s).step);
  return step;
}

} // namespace unisono::lowering
