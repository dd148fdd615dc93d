#include "lower/lower.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "lower/storage.hpp"

namespace unisono::lowering {

namespace {

using Wait = Program::Wait;

// The programs of all ranks one after the other: the waits of each, and the tables of one.
class Programs {
public:
  Programs(const Versions &versions, const Storage &storage, std::int32_t wanted)
      : versions_(versions), storage_(storage), wanted_(wanted),
        known_(storage.mine.size()), latest_(known_.size()), arrived_(known_.size()) {}

  Lowered all() {
    for (const std::vector<Index> &acts : storage_.acts)
      found_.program.lead.push_back(static_cast<std::int32_t>(
          std::count_if(acts.begin(), acts.end(), [this](Index v) {
            return versions_.at(v).given() && !versions_.at(v).delivers;
          })));
    for (std::size_t rank = 0; rank < storage_.mine.size(); ++rank)
      add(static_cast<std::int32_t>(rank));
    mark_awaited();
    found_.places = storage_.places;
    for (Index v = 0; v < versions_.size(); ++v) {
      found_.depth = std::max(found_.depth, at(v).step + 1);
      found_.canonical &= at(v).num_sources() <= 1 || adds_all_inputs(at(v));
    }
    return std::move(found_);
  }

private:
  const Version &at(Index v) const { return versions_.at(v); }
  bool adds_all_inputs(const Version &v) const {
    const auto sources = versions_.sources(v);
    return v.num_sources() == versions_.input().n &&
           std::all_of(sources.begin(), sources.end(),
                       [this](Index s) { return at(s).given(); });
  }
  bool is_wanted() const { return rank_ == wanted_; }
  bool is_local(const Version &v) const {
    return versions_.input().on_one_host(v.rank, rank_);
  }

  void add(std::int32_t rank) {
    rank_ = rank;
    std::fill(known_.begin(), known_.end(), 0);
    std::fill(arrived_.begin(), arrived_.end(), 0);
    find_exposed();
    send();
    for (const Index v : storage_.acts[static_cast<std::size_t>(rank)])
      act(v);
    copy_given_results();
    find_exits();
    if (is_wanted())
      find_readers();
  }

  // What others read where it is, by its slot.
  void find_exposed() {
    exposed_.clear();
    for (const Index v : storage_.mine[static_cast<std::size_t>(rank_)])
      if (at(v).local_readers + at(v).remote_readers > 0 && at(v).window == none)
        exposed_.emplace_back(at(v).slot, v);
    std::stable_sort(exposed_.begin(), exposed_.end(),
                     [](const auto &a, const auto &b) { return a.first < b.first; });
  }

  // The messages, in the order of those that read them, numbered for each receiver. Those
  // of one step go to different ranks at the same time, and of those to one rank what was
  // made first goes first. Any order inside a step will do, as lower.py says.
  void send() {
    messages_.clear();
    last_message_.clear();
    for (const Index v : storage_.mine[static_cast<std::size_t>(rank_)])
      if (at(v).remote_readers > 0)
        for (const Index w : versions_.readers(v))
          if (versions_.reads_from_other_host(at(v), at(w)))
            messages_.emplace_back(order_of(w, hop_to(at(w).rank)), v, w);
    std::stable_sort(messages_.begin(), messages_.end(), [](const auto &a, const auto &b) {
      return std::get<0>(a) < std::get<0>(b);
    });
    order_as_read();
    std::map<std::int32_t, std::int32_t> count;
    std::vector<Program::Message> rows;
    for (const auto &[_, v, w] : messages_) {
      last_message_[v][at(w).rank] = count[at(w).rank]++;
      rows.push_back(message(v, w));
      await_own(rows.back().after);
    }
    sent_to_.assign(count.begin(), count.end());
    if (is_wanted())
      rows_ = std::move(rows);
  }

  // Several messages to one reader, in the order of its sources.
  void order_as_read() {
    for (auto first = messages_.begin(); first != messages_.end();) {
      const Index w = std::get<2>(*first);
      const auto end = std::find_if(first, messages_.end(), [w](const auto &message) {
        return std::get<2>(message) != w;
      });
      if (end - first == 1) {
        first = end;
        continue;
      }
      for (const Index s : versions_.sources(at(w)))
        if (at(s).rank == rank_)
          std::get<1>(*first++) = s;
    }
  }

  using Order =
      std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t, std::int32_t>;

  Order order_of(Index w, std::int32_t hop) const {
    const std::int32_t distance = nearest(versions_, at(w).rank, versions_.sources(at(w)));
    return {at(w).step, distance, hop, latest_step(versions_, at(w)), at(w).slot};
  }

  // How much further that rank is than this one, counting up and around.
  std::int32_t hop_to(std::int32_t to) const {
    const auto n = static_cast<std::int32_t>(versions_.input().n);
    return (to - rank_ + n) % n;
  }

  Program::Message message(Index index, Index reader) const {
    const Version &v = at(index);
    const bool windowed = v.window != none, input = !windowed && v.given();
    const rows::Home home =
        windowed ? Program::window : input ? Program::input : Program::output;
    // The input is there before anything is done, unless it leaves from the window.
    return {at(reader).rank, v.chunk, home, windowed ? v.window : v.slot,
            input ? 0 : v.action + 1};
  }

  void act(Index index) {
    const Version &v = at(index);
    Program::Action row = begun(v, v.window, v.given() ? (v.final ? v.slot : none)
                                                       : (v.output ? v.slot : none));
    if (v.given())
      add_source(v, v);
    else
      gather(v, row);
    if (is_wanted() && v.delivers)
      add_deliveries(index);
    end(row);
  }

  void add_deliveries(Index maker) {
    for (const Index w : versions_.readers(maker))
      if (at(w).delivered)
        found_.program.deliveries.push_back(at(w).rank);
  }

  Program::Action begun(const Version &v, std::int32_t window, std::int32_t output) const {
    const auto end = [](const auto &rows) { return static_cast<std::int32_t>(rows.size()); };
    const Program &made = found_.program;
    return {v.chunk, window, output, 0, end(made.sources), 0, end(made.waits), 0,
            end(made.deliveries), 0, none, 0, 0};
  }

  void end(Program::Action row) {
    ++actions_;
    if (!is_wanted())
      return;
    Program &made = found_.program;
    row.end_source = static_cast<std::int32_t>(made.sources.size());
    row.end_wait = static_cast<std::int32_t>(made.waits.size());
    row.end_delivery = static_cast<std::int32_t>(made.deliveries.size());
    made.actions.push_back(row);
  }

  // The sources, and the waits: for what is read here, and for those who read what lies
  // where the result is written.
  void gather(const Version &v, Program::Action &row) {
    for (const Index s : versions_.sources(v))
      if (is_local(at(s)))
        await(at(s));
    if (v.output)
      await_readers(v);
    take_waits(&found_.program.waits);
    if (v.output)
      await_messages(v);
    for (const Index s : versions_.sources(v))
      add_source(at(s), v);
    row.completes = v.num_sources() > 1 && v.contributors == versions_.input().n;
  }

  template <class Visit> void each_exposed_before(const Version &v, Visit visit) const {
    auto one = std::lower_bound(exposed_.begin(), exposed_.end(), v.slot,
                                [](const auto &a, std::int32_t slot) { return a.first < slot; });
    for (; one != exposed_.end() && one->first == v.slot; ++one)
      if (at(one->second).step < v.step)
        visit(one->second);
  }

  void await_readers(const Version &v) {
    each_exposed_before(v, [this](Index u) { await_local_readers(u); });
  }

  void await_local_readers(Index u) {
    for (const Index w : versions_.readers(u))
      if (versions_.reads_here(at(u), at(w)))
        await(at(w));
  }

  // The messages with what lies there must have left.
  void await_messages(const Version &v) {
    each_exposed_before(v, [this](Index u) {
      if (const auto sent = last_message_.find(u); sent != last_message_.end())
        for (const auto &[to, number] : sent->second)
          await_count(to, number);
    });
    take_waits(&found_.program.waits);
  }

  void await(const Version &v) {
    if (v.rank != rank_ && v.action >= 0)
      await_count(v.rank, v.action);
  }

  // An action, or a message, by its number; unless it is known to be done.
  void await_count(std::int32_t rank, std::int32_t number) {
    const auto at = static_cast<std::size_t>(rank);
    if (number < known_[at])
      return;
    if (latest_[at] == 0)
      awaiting_.push_back(rank);
    latest_[at] = std::max(latest_[at], number + 1);
  }

  // One wait per rank, for the latest of what is awaited.
  void take_waits(std::vector<Wait> *rows) {
    std::sort(awaiting_.begin(), awaiting_.end());
    for (const std::int32_t rank : awaiting_) {
      const std::int32_t count = std::exchange(latest_[static_cast<std::size_t>(rank)], 0);
      known_[static_cast<std::size_t>(rank)] = count;
      add_wait(*rows, {rank, count});
    }
    awaiting_.clear();
  }

  void add_wait(std::vector<Wait> &rows, Wait wait) {
    if (wait.rank == wanted_)
      awaited_.insert(wait.count);
    if (is_wanted())
      rows.push_back(wait);
  }

  void await_own(std::int32_t count) {
    if (is_wanted())
      awaited_.insert(count);
  }

  // A rank reads its own input rather than its window.
  void add_source(const Version &v, const Version &reader) {
    if (!is_wanted())
      return;
    std::vector<Program::Source> &rows = found_.program.sources;
    if (!is_local(v))
      rows.push_back({Program::stream, v.rank, arrived_[static_cast<std::size_t>(v.rank)]++});
    else if (v.window != none && !(v.given() && versions_.is_same_slot(v, reader)))
      rows.push_back({Program::window, v.rank, v.window});
    else
      rows.push_back({v.given() ? Program::input : Program::output, v.rank, v.slot});
  }

  // What is given and already the result must only be copied to the output.
  void copy_given_results() {
    for (const Index index : storage_.mine[static_cast<std::size_t>(rank_)]) {
      const Version &v = at(index);
      if (!v.given() || !v.final || v.action >= 0)
        continue;
      const Program::Action row = begun(v, none, v.slot);
      add_source(v, v);
      end(row);
    }
    found_.longest = std::max(found_.longest, std::exchange(actions_, 0));
  }

  // What is waited for at the very end: those who read or write where this rank's buffers
  // are, and messages that must have left.
  void find_exits() {
    std::fill(known_.begin(), known_.end(), 0);
    for (const auto &[_, u] : exposed_)
      await_local_readers(u);
    for (const Index v : storage_.mine[static_cast<std::size_t>(rank_)])
      if (at(v).delivered)
        await(at(versions_.sources(at(v))[0]));
    take_waits(&found_.program.exits);
    for (const auto &[to, count] : sent_to_)
      add_wait(found_.program.exits, {to, count});
  }

  void find_readers() {
    std::set<std::int32_t> ranks;
    for (const Index v : storage_.mine[static_cast<std::size_t>(rank_)])
      if (at(v).window != none)
        for (const Index w : versions_.readers(v))
          if (!versions_.is_same_slot(at(v), at(w)) && !at(w).delivered)
            ranks.insert(at(w).rank);
    ranks.erase(rank_);
    found_.program.readers.assign(ranks.begin(), ranks.end());
  }

  void mark_awaited() {
    std::int32_t number = 0;
    for (Program::Action &row : found_.program.actions)
      row.is_awaited = awaited_.contains(++number);
    found_.program.add_messages(rows_);
  }

  const Versions &versions_;
  const Storage &storage_;
  const std::int32_t wanted_;
  Lowered found_;
  std::int32_t rank_ = 0;
  std::size_t actions_ = 0; // of this rank
  std::vector<std::int32_t> known_, latest_, arrived_, awaiting_; // by rank; the last lists
  // Of each version that this rank sends: its last message to each receiver.
  std::unordered_map<Index, std::map<std::int32_t, std::int32_t>> last_message_;
  std::vector<std::pair<std::int32_t, Index>> exposed_;
  std::vector<std::tuple<Order, Index, Index>> messages_;
  std::vector<std::pair<std::int32_t, std::int32_t>> sent_to_; // how many go to each rank
  std::vector<Program::Message> rows_;
  std::set<std::int32_t> awaited_;
};

} // namespace

std::optional<Lowered> lower(const Input &input, Shared shared, std::int32_t rank) {
  Versions versions(input);
  if (versions.has_mixed_names())
    return {};
  const Storage storage(versions, shared);
  return Programs(versions, storage, rank).all();
}

} // namespace unisono::lowering
