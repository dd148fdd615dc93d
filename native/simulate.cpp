#include "simulate.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace unisono::sim {

namespace {
constexpr double never = std::numeric_limits<double>::infinity();
constexpr double close_enough = 1e-12; // rates that are the same
// Flows that began and shared alike end together but for rounding; a look at the shares
// for each of them apart would cost more than all the rest.
constexpr double at_once = 1e-9;
// Where thousands share, sizes that differ by a byte would still end one by one, and each
// end changes all rates. Then what ends this close ends together.
constexpr double nearly_at_once = 1e-5;
constexpr std::size_t many_flows = 4096;
constexpr std::size_t fewest_events = 1 << 16; // before outdated ones are looked for
} // namespace

Simulator::Simulator(std::int64_t n, std::int64_t num_slots, std::vector<double> sizes,
                     std::vector<double> bandwidth, std::vector<std::int64_t> twins,
                     Costs costs)
    : n_(n), num_slots_(num_slots), sizes_(std::move(sizes)), costs_(costs),
      writers_(static_cast<std::size_t>(n * num_slots), -1),
      readers_(static_cast<std::size_t>(n * num_slots), -1),
      written_(static_cast<std::size_t>(n * num_slots), -1),
      wrote_(static_cast<std::size_t>(n * num_slots), -1), queue_(static_cast<std::size_t>(n)),
      carried_(bandwidth.size(), 0.0), links_(bandwidth.size()) {
  for (std::size_t k = 0; k < bandwidth.size(); ++k)
    links_[k].bandwidth = links_[k].room = bandwidth[k];
  for (std::size_t k = 0; k < twins.size(); ++k)
    links_[k].twin = static_cast<std::int32_t>(twins[k]);
}

// --- from steps to messages and what they wait for

std::int32_t Simulator::message_of(std::int64_t pair, std::int32_t step) {
  const auto [found, is_new] =
      here_.try_emplace(pair, static_cast<std::int32_t>(messages_.size()));
  if (is_new) {
    Message m{};
    m.src = static_cast<std::int32_t>(pair / n_);
    m.dst = static_cast<std::int32_t>(pair % n_);
    m.step = step;
    const auto known = path_of_.find(pair);
    if (known != path_of_.end()) {
      m.path = known->second;
    } else {
      m.path = static_cast<std::int32_t>(path_of_.size());
      path_of_.emplace(pair, m.path);
      unknown_.push_back(pair);
    }
    queue_[static_cast<std::size_t>(m.src)].push_back(found->second);
    messages_.push_back(m);
  }
  return found->second;
}

bool Simulator::add(const std::vector<Transfer> &step) {
  here_.clear();
  of_transfer_.clear();
  const std::size_t edges_before = edges_.size();
  for (const Transfer &t : step) {
    if (t.src < 0 || t.src >= n_ || t.dst < 0 || t.dst >= n_ || t.chunk < 0 ||
        t.chunk >= num_slots_ || t.into < 0 || t.into >= num_slots_)
      return false;
    const std::int32_t id = message_of(t.src * n_ + t.dst, steps_);
    Message &m = messages_[static_cast<std::size_t>(id)];
    const double size = sizes_[static_cast<std::size_t>(t.chunk)];
    m.nbytes += size;
    if (t.reduces)
      m.reduced += size;
    of_transfer_.push_back(id);
  }
  reads(step);
  writes(step);
  note(step);
  thin_out(edges_before);
  ++steps_;
  return true;
}

void Simulator::wait(std::int32_t before, std::int32_t after) {
  if (before != after)
    edges_.push_back(Edge{before, after});
}

// Chunks that travel together mostly wait for the same messages: each edge once.
void Simulator::thin_out(std::size_t from) {
  const auto first = edges_.begin() + static_cast<std::ptrdiff_t>(from);
  const auto order = [](const Edge &a, const Edge &b) {
    return a.after != b.after ? a.after < b.after : a.before < b.before;
  };
  const auto same = [](const Edge &a, const Edge &b) {
    return a.after == b.after && a.before == b.before;
  };
  if (!std::is_sorted(first, edges_.end(), order))
    std::sort(first, edges_.end(), order);
  edges_.erase(std::unique(first, edges_.end(), same), edges_.end());
}

// Everything that is read must have been written: by the last earlier step that wrote it.
void Simulator::reads(const std::vector<Transfer> &step) {
  for (std::size_t i = 0; i < step.size(); ++i) {
    const Transfer &t = step[i];
    const std::int32_t id = of_transfer_[i];
    for (auto c = writers_[static_cast<std::size_t>(t.chunk * n_ + t.src)]; c >= 0;
         c = cells_[static_cast<std::size_t>(c)].next)
      wait(cells_[static_cast<std::size_t>(c)].message, id);
  }
}

// What is overwritten must have been written and read by all who came before.
void Simulator::writes(const std::vector<Transfer> &step) {
  for (std::size_t i = 0; i < step.size(); ++i) {
    const auto slot = static_cast<std::size_t>(step[i].into * n_ + step[i].dst);
    for (const auto *heads : {&writers_, &readers_})
      for (auto c = (*heads)[slot]; c >= 0; c = cells_[static_cast<std::size_t>(c)].next)
        wait(cells_[static_cast<std::size_t>(c)].message, of_transfer_[i]);
    written_[slot] = steps_;
  }
}

// Remember who wrote and read what; a read in the step of a write saw what was before.
void Simulator::note(const std::vector<Transfer> &step) {
  for (std::size_t i = 0; i < step.size(); ++i) {
    const Transfer &t = step[i];
    const std::int64_t to = t.into * n_ + t.dst;
    if (wrote_[static_cast<std::size_t>(to)] != steps_) {
      drop(writers_, to);
      drop(readers_, to);
      wrote_[static_cast<std::size_t>(to)] = steps_;
    }
    push(writers_, to, of_transfer_[i]);
    const std::int64_t from = t.chunk * n_ + t.src;
    if (written_[static_cast<std::size_t>(from)] != steps_)
      push(readers_, from, of_transfer_[i]);
  }
}

void Simulator::push(std::vector<std::int32_t> &head, std::int64_t slot,
                     std::int32_t message) {
  std::int32_t &first = head[static_cast<std::size_t>(slot)];
  if (first >= 0 && cells_[static_cast<std::size_t>(first)].message == message)
    return;
  std::int32_t cell = spare_;
  if (cell >= 0) {
    spare_ = cells_[static_cast<std::size_t>(cell)].next;
  } else {
    cell = static_cast<std::int32_t>(cells_.size());
    cells_.push_back({});
  }
  cells_[static_cast<std::size_t>(cell)] = {message, first};
  first = cell;
}

void Simulator::drop(std::vector<std::int32_t> &head, std::int64_t slot) {
  std::int32_t &first = head[static_cast<std::size_t>(slot)];
  while (first >= 0) {
    Cell &cell = cells_[static_cast<std::size_t>(first)];
    const std::int32_t next = cell.next;
    cell.next = spare_;
    spare_ = first;
    first = next;
  }
}

std::vector<std::int64_t> Simulator::edges() const {
  std::vector<std::int64_t> found;
  const auto count = static_cast<std::int64_t>(messages_.size());
  for (const Edge &edge : edges_)
    found.push_back(edge.before * count + edge.after);
  return found;
}

bool Simulator::know(const std::vector<std::int64_t> &first,
                     const std::vector<std::int64_t> &links,
                     const std::vector<double> &latency) {
  if (first.size() != unknown_.size() + 1 || latency.size() != unknown_.size() ||
      first.front() != 0 || first.back() != static_cast<std::int64_t>(links.size()) ||
      !std::is_sorted(first.begin(), first.end()))
    return false;
  const std::int64_t base = first_.back();
  for (std::size_t k = 0; k < unknown_.size(); ++k) {
    double cap = never;
    for (std::int64_t i = first[k]; i < first[k + 1]; ++i) {
      const std::int64_t link = links[static_cast<std::size_t>(i)];
      if (link < 0 || link >= static_cast<std::int64_t>(links_.size()))
        return false;
      path_links_.push_back(static_cast<std::int32_t>(link));
      cap = std::min(cap, links_[static_cast<std::size_t>(link)].bandwidth);
    }
    first_.push_back(base + first[k + 1]);
    path_latency_.push_back(latency[k]);
    path_cap_.push_back(cap);
  }
  unknown_.clear();
  return true;
}

// --- the run

void Simulator::link_edges() {
  next_.assign(messages_.size() + 1, 0);
  for (const Edge &edge : edges_)
    ++next_[static_cast<std::size_t>(edge.before) + 1];
  for (std::size_t k = 1; k < next_.size(); ++k)
    next_[k] += next_[k - 1];
  then_.resize(edges_.size());
  std::vector<std::int64_t> at(next_.begin(), next_.end() - 1);
  for (const Edge &edge : edges_) {
    std::int64_t &place = at[static_cast<std::size_t>(edge.before)];
    then_[static_cast<std::size_t>(place++)] = edge.after;
    ++messages_[static_cast<std::size_t>(edge.after)].waits_for;
  }
}

// A message leaves when the one before it to the same rank has.
void Simulator::link_streams() {
  behind_.assign(messages_.size(), -1);
  std::unordered_map<std::int32_t, std::int32_t> last; // by path, that is by pair
  for (const auto &mine : queue_)
    for (const std::int32_t id : mine) {
      Message &m = messages_[static_cast<std::size_t>(id)];
      const auto [found, is_first] = last.try_emplace(m.path, id);
      if (is_first)
        continue;
      behind_[static_cast<std::size_t>(found->second)] = id;
      found->second = id;
      ++m.waits_for;
    }
}

void Simulator::begin_ranks(const std::vector<double> &begin) {
  for (std::size_t rank = 0; rank < queue_.size(); ++rank) {
    if (!costs_.streams) {
      offer(static_cast<std::int32_t>(rank), begin[rank], -1);
      continue;
    }
    for (const std::int32_t id : queue_[rank])
      if (messages_[static_cast<std::size_t>(id)].waits_for == 0)
        leave(id, begin[rank], -1);
  }
}

// An end that was foreseen before rates changed.
bool Simulator::stale(const Event &event) const {
  return event.kind == Kind::drained &&
         event.version != flows_[static_cast<std::size_t>(event.message)].version;
}

// Every change of a rate leaves an outdated event behind; they must not pile up.
void Simulator::forget_stale() {
  if (events_.size() < std::max(fewest_events, 2 * kept_events_))
    return;
  std::erase_if(events_, [this](const Event &event) { return stale(event); });
  std::make_heap(events_.begin(), events_.end(), std::greater<>{});
  kept_events_ = events_.size();
}

std::int64_t Simulator::run(const std::vector<double> &begin) {
  link_edges();
  if (costs_.streams)
    link_streams();
  const auto ranks = static_cast<std::size_t>(n_);
  turn_.assign(ranks, 0);
  last_.assign(ranks, 0);
  unsent_.assign(ranks, 0);
  sending_ = adding_ = finished_ = begin;
  flows_.resize(messages_.size());
  begin_ranks(begin);
  std::int64_t count = 0;
  while (!events_.empty()) {
    const double now = events_.front().time;
    const double until = now * (1 + (open_flows_ > many_flows ? nearly_at_once : at_once));
    while (!events_.empty() && events_.front().time <= until) {
      std::pop_heap(events_.begin(), events_.end(), std::greater<>{});
      const Event event = events_.back();
      events_.pop_back();
      if (stale(event))
        continue;
      ++count;
      handle(event);
    }
    settle(now);
    forget_stale();
  }
  return count;
}

void Simulator::schedule(double time, std::int32_t message, Kind kind,
                         std::uint32_t version) {
  events_.push_back({time, message, version, kind});
  std::push_heap(events_.begin(), events_.end(), std::greater<>{});
}

// It is the turn of the next step that this rank sends in: those that need not wait leave.
void Simulator::offer(std::int32_t rank, double now, std::int32_t cause) {
  const auto r = static_cast<std::size_t>(rank);
  const auto &mine = queue_[r];
  turn_[r] = last_[r];
  if (turn_[r] == mine.size())
    return;
  const auto step_of = [&](std::size_t k) {
    return messages_[static_cast<std::size_t>(mine[k])].step;
  };
  while (last_[r] < mine.size() && step_of(last_[r]) == step_of(turn_[r]))
    ++last_[r];
  unsent_[r] = static_cast<std::int32_t>(last_[r] - turn_[r]);
  for (std::size_t k = turn_[r]; k < last_[r]; ++k)
    if (messages_[static_cast<std::size_t>(mine[k])].waits_for == 0)
      leave(mine[k], now, cause);
}

void Simulator::leave(std::int32_t message, double now, std::int32_t cause) {
  Message &m = messages_[static_cast<std::size_t>(message)];
  m.waits_for = -1; // on its way
  m.cause = cause;
  double &busy = sending_[static_cast<std::size_t>(m.src)];
  busy = std::max(busy, now);
  if (m.src != m.dst)
    busy += costs_.overhead + costs_.encode * m.nbytes;
  schedule(busy, message, Kind::start);
}

void Simulator::handle(const Event &event) {
  Message &m = messages_[static_cast<std::size_t>(event.message)];
  const double now = event.time;
  switch (event.kind) {
  case Kind::start:
    m.start = now;
    open(event.message, now);
    break;
  case Kind::drained:
    close(event.message, now);
    break;
  case Kind::arrived: {
    const double work = costs_.reduce * m.reduced +
                        (m.src == m.dst ? 0 : costs_.decode * m.nbytes);
    if (work <= 0) {
      complete(event.message, now);
      break;
    }
    double &busy = adding_[static_cast<std::size_t>(m.dst)];
    busy = std::max(busy, now) + work;
    schedule(busy, event.message, Kind::done);
    break;
  }
  case Kind::done:
    complete(event.message, now);
    break;
  }
}

void Simulator::complete(std::int32_t message, double now) {
  Message &m = messages_[static_cast<std::size_t>(message)];
  m.end = now;
  double &through = finished_[static_cast<std::size_t>(m.dst)];
  through = std::max(through, now);
  for (std::int64_t k = next_[static_cast<std::size_t>(message)];
       k < next_[static_cast<std::size_t>(message) + 1]; ++k) {
    const std::int32_t id = then_[static_cast<std::size_t>(k)];
    Message &after = messages_[static_cast<std::size_t>(id)];
    if (--after.waits_for > 0)
      continue;
    if (costs_.streams) {
      leave(id, now, message);
      continue;
    }
    const auto r = static_cast<std::size_t>(after.src);
    if (turn_[r] < last_[r] &&
        messages_[static_cast<std::size_t>(queue_[r][turn_[r]])].step == after.step)
      leave(id, now, message);
  }
}

// --- flows and the links they share

void Simulator::mark(std::int32_t at) {
  Link &link = links_[static_cast<std::size_t>(at)];
  if (link.dirty)
    return;
  link.dirty = true;
  dirty_.push_back(at);
}

// A link has begun to carry, or has ceased to: what it and its other direction have now.
void Simulator::other_way(Link &link) {
  if (link.twin < 0)
    return;
  Link &twin = links_[static_cast<std::size_t>(link.twin)];
  link.room = link.bandwidth * (twin.flows.empty() ? 1 : costs_.duplex);
  twin.room = twin.bandwidth * (link.flows.empty() ? 1 : costs_.duplex);
  if (!twin.flows.empty())
    mark(link.twin);
}

void Simulator::open(std::int32_t message, double now) {
  const Message &m = messages_[static_cast<std::size_t>(message)];
  Flow &flow = flows_[static_cast<std::size_t>(message)];
  const auto p = static_cast<std::size_t>(m.path);
  flow.left = m.src == m.dst ? 0 : m.nbytes * costs_.ratio;
  flow.cap = path_cap_[p];
  flow.since = now;
  flow.rate = 0;
  if (flow.left <= 0 || first_[p] == first_[p + 1]) {
    flow.left = 0;
    schedule(now, message, Kind::drained, flow.version);
    return;
  }
  for (std::int64_t i = first_[p]; i < first_[p + 1]; ++i) {
    const std::int32_t at = path_links_[static_cast<std::size_t>(i)];
    Link &link = links_[static_cast<std::size_t>(at)];
    link.claimed += flow.cap;
    link.flows.push_back(message);
    carried_[static_cast<std::size_t>(at)] += flow.left;
    if (link.flows.size() == 1)
      other_way(link);
    if (link.crowded())
      mark(at);
  }
  ++open_flows_;
  fresh_.push_back(message);
}

void Simulator::close(std::int32_t message, double now) {
  const Message &m = messages_[static_cast<std::size_t>(message)];
  Flow &flow = flows_[static_cast<std::size_t>(message)];
  const auto p = static_cast<std::size_t>(m.path);
  ++flow.version;
  if (flow.rate > 0) {
    --open_flows_;
    for (std::int64_t i = first_[p]; i < first_[p + 1]; ++i) {
      const std::int32_t at = path_links_[static_cast<std::size_t>(i)];
      Link &link = links_[static_cast<std::size_t>(at)];
      if (link.crowded())
        mark(at);
      auto &flows = link.flows;
      *std::find(flows.begin(), flows.end(), message) = flows.back();
      flows.pop_back();
      link.claimed = flows.empty() ? 0 : link.claimed - flow.cap;
      if (flows.empty())
        other_way(link);
    }
  }
  flow.rate = 0;
  schedule(now + path_latency_[p], message, Kind::arrived);
  const auto r = static_cast<std::size_t>(m.src);
  finished_[r] = std::max(finished_[r], now);
  if (costs_.streams) {
    const std::int32_t next = behind_[static_cast<std::size_t>(message)];
    if (next >= 0 && --messages_[static_cast<std::size_t>(next)].waits_for == 0)
      leave(next, now, message);
  } else if (--unsent_[r] == 0) {
    offer(m.src, now, message);
  }
}

// New rates for all whose share may have changed. A link that could carry all its flows
// at the rate of their narrowest links never holds anybody up, and joins nothing.
void Simulator::settle(double now) {
  if (!dirty_.empty()) {
    gather();
    fill();
    for (const std::int32_t f : some_flows_) {
      Flow &flow = flows_[static_cast<std::size_t>(f)];
      flow.listed = false;
      if (flow.rate == 0 || std::abs(flow.share - flow.rate) > close_enough * flow.rate)
        apply(f, flow.share, now);
    }
  }
  for (const std::int32_t f : fresh_) {
    const Flow &flow = flows_[static_cast<std::size_t>(f)];
    if (flow.rate == 0)
      apply(f, flow.cap, now);
  }
  fresh_.clear();
}

// All flows that a change may reach, through links that are crowded, and those links.
void Simulator::gather() {
  some_links_.clear();
  some_flows_.clear();
  for (const std::int32_t at : dirty_) {
    Link &link = links_[static_cast<std::size_t>(at)];
    link.dirty = false;
    link.listed = true;
    some_links_.push_back(at);
  }
  dirty_.clear();
  for (std::size_t k = 0; k < some_links_.size(); ++k)
    for (const std::int32_t f : links_[static_cast<std::size_t>(some_links_[k])].flows) {
      Flow &flow = flows_[static_cast<std::size_t>(f)];
      if (flow.listed)
        continue;
      flow.listed = true;
      some_flows_.push_back(f);
      const auto p = static_cast<std::size_t>(messages_[static_cast<std::size_t>(f)].path);
      for (std::int64_t i = first_[p]; i < first_[p + 1]; ++i) {
        const std::int32_t at = path_links_[static_cast<std::size_t>(i)];
        Link &link = links_[static_cast<std::size_t>(at)];
        if (!link.listed && link.crowded()) {
          link.listed = true;
          some_links_.push_back(at);
        }
      }
    }
  for (const std::int32_t at : some_links_)
    links_[static_cast<std::size_t>(at)].listed = false;
}

// Progressive filling: all rates grow alike, until a link is full or a flow has all that
// its narrowest link allows; those stop, the others go on.
void Simulator::fill() {
  std::vector<std::int32_t> &links = filling_links_, &by_cap = filling_flows_;
  links.clear();
  for (const std::int32_t at : some_links_) {
    Link &link = links_[static_cast<std::size_t>(at)];
    if (!link.crowded())
      continue;
    link.left = link.room;
    link.open = static_cast<std::int32_t>(link.flows.size());
    links.push_back(at);
  }
  by_cap = some_flows_;
  const auto narrower = [this](std::int32_t a, std::int32_t b) {
    return flows_[static_cast<std::size_t>(a)].cap < flows_[static_cast<std::size_t>(b)].cap;
  };
  if (!std::is_sorted(by_cap.begin(), by_cap.end(), narrower))
    std::sort(by_cap.begin(), by_cap.end(), narrower);
  for (const std::int32_t f : by_cap)
    flows_[static_cast<std::size_t>(f)].growing = true;
  std::size_t next = 0;
  while (true) {
    while (next < by_cap.size() && !flows_[static_cast<std::size_t>(by_cap[next])].growing)
      ++next;
    if (next == by_cap.size())
      return;
    double level = flows_[static_cast<std::size_t>(by_cap[next])].cap;
    for (const std::int32_t at : links)
      level = std::min(level, links_[static_cast<std::size_t>(at)].share());
    stop_at(level, next);
  }
}

// Ends the growth of every flow that can have no more than `level`.
void Simulator::stop_at(double level, std::size_t next) {
  const double edge = level * (1 + close_enough);
  full_.clear();
  for (const std::int32_t at : filling_links_)
    if (links_[static_cast<std::size_t>(at)].share() <= edge)
      full_.push_back(at);
  for (const std::int32_t at : full_)
    for (const std::int32_t f : links_[static_cast<std::size_t>(at)].flows)
      if (flows_[static_cast<std::size_t>(f)].growing)
        stop(f, level);
  for (; next < filling_flows_.size(); ++next) {
    const Flow &flow = flows_[static_cast<std::size_t>(filling_flows_[next])];
    if (flow.growing && flow.cap > edge)
      break;
    if (flow.growing)
      stop(filling_flows_[next], level);
  }
  std::erase_if(filling_links_, [this](std::int32_t at) {
    return links_[static_cast<std::size_t>(at)].open <= 0;
  });
}

void Simulator::stop(std::int32_t message, double level) {
  Flow &flow = flows_[static_cast<std::size_t>(message)];
  flow.growing = false;
  flow.share = level;
  const auto p = static_cast<std::size_t>(messages_[static_cast<std::size_t>(message)].path);
  for (std::int64_t i = first_[p]; i < first_[p + 1]; ++i) {
    Link &link = links_[static_cast<std::size_t>(path_links_[static_cast<std::size_t>(i)])];
    link.left = std::max(0.0, link.left - level);
    --link.open;
  }
}

void Simulator::apply(std::int32_t message, double rate, double now) {
  Flow &flow = flows_[static_cast<std::size_t>(message)];
  flow.left = std::max(0.0, flow.left - flow.rate * (now - flow.since));
  flow.since = now;
  flow.rate = rate;
  schedule(now + flow.left / rate, message, Kind::drained, ++flow.version);
}

} // namespace unisono::sim
