#include "simulate/simulator.hpp"

#include <algorithm>

namespace unisono::sim {

namespace {
// Flows that began together with equal shares end together except for rounding. Computing
// new rates after each of them would cost more than all the rest.
constexpr double at_once = 1e-9;
// With thousands of flows, sizes that differ by a byte would end one by one, and each end
// changes all rates. So flows that end this close to each other end together.
constexpr double nearly_at_once = 1e-5;
constexpr std::size_t many_flows = 4096;
} // namespace

Simulator::Simulator(std::int64_t n, std::int64_t num_slots, std::vector<double> sizes,
                     const std::vector<double> &bandwidth,
                     const std::vector<std::int64_t> &twins, Costs costs)
    : costs_(costs), order_(n, num_slots, std::move(sizes), costs.streams),
      network_(bandwidth, twins, costs.ratio, costs.duplex, order_.messages(), agenda_) {}

bool Simulator::know(const std::vector<std::int64_t> &first,
                     const std::vector<std::int64_t> &links,
                     const std::vector<double> &latency) {
  if (!network_.know(unknown().size(), first, links, latency))
    return false;
  order_.forget_unknown();
  return true;
}

std::int64_t Simulator::run(const std::vector<double> &begin) {
  order_.complete();
  turn_.assign(order_.num_ranks(), 0);
  last_.assign(order_.num_ranks(), 0);
  unsent_.assign(order_.num_ranks(), 0);
  sending_ = adding_ = finished_ = begin;
  network_.begin();
  begin_ranks(begin);
  std::int64_t count = 0;
  const auto stale = [this](const Event &event) { return network_.stale(event); };
  while (!agenda_.empty()) {
    const double now = agenda_.soonest();
    const bool many = network_.open_flows() > many_flows;
    const double until = now * (1 + (many ? nearly_at_once : at_once));
    while (!agenda_.empty() && agenda_.soonest() <= until) {
      const Event event = agenda_.take();
      if (stale(event))
        continue;
      ++count;
      handle(event);
    }
    network_.settle(now);
    agenda_.forget(stale);
  }
  return count;
}

void Simulator::begin_ranks(const std::vector<double> &begin) {
  for (std::size_t rank = 0; rank < order_.num_ranks(); ++rank) {
    if (!costs_.streams) {
      offer(static_cast<std::int32_t>(rank), begin[rank], -1);
      continue;
    }
    for (const std::int32_t id : order_.sent_by(rank))
      if (message(id).waits_for == 0)
        leave(id, begin[rank], -1);
  }
}

// Begins the next step in which this rank sends: messages without dependencies are sent.
void Simulator::offer(std::int32_t rank, double now, std::int32_t cause) {
  const auto r = static_cast<std::size_t>(rank);
  const auto &mine = order_.sent_by(r);
  turn_[r] = last_[r];
  if (turn_[r] == mine.size())
    return;
  const auto step_of = [&](std::size_t k) { return message(mine[k]).step; };
  while (last_[r] < mine.size() && step_of(last_[r]) == step_of(turn_[r]))
    ++last_[r];
  unsent_[r] = static_cast<std::int32_t>(last_[r] - turn_[r]);
  for (std::size_t k = turn_[r]; k < last_[r]; ++k)
    if (message(mine[k]).waits_for == 0)
      leave(mine[k], now, cause);
}

void Simulator::leave(std::int32_t id, double now, std::int32_t cause) {
  Message &m = message(id);
  m.waits_for = -1; // in flight
  m.cause = cause;
  double &busy = sending_[static_cast<std::size_t>(m.src)];
  busy = std::max(busy, now);
  if (m.src != m.dst)
    busy += (m.first ? costs_.overhead : 0) + costs_.encode * m.nbytes;
  agenda_.add(busy, id, Event::Kind::start);
}

void Simulator::handle(const Event &event) {
  switch (event.kind) {
  case Event::Kind::start:
    message(event.message).start = event.time;
    network_.open(event.message, event.time);
    break;
  case Event::Kind::drained:
    drained(event.message, event.time);
    break;
  case Event::Kind::arrived:
    arrived(event.message, event.time);
    break;
  case Event::Kind::done:
    done(event.message, event.time);
    break;
  }
}

// A message has been sent completely: the next one of its rank may follow.
void Simulator::drained(std::int32_t id, double now) {
  const Message &m = message(id);
  network_.close(id);
  agenda_.add(now + network_.latency(m.path), id, Event::Kind::arrived);
  const auto r = static_cast<std::size_t>(m.src);
  finished_[r] = std::max(finished_[r], now);
  if (costs_.streams) {
    const std::int32_t next = order_.behind(id);
    if (next >= 0 && --message(next).waits_for == 0)
      leave(next, now, id);
  } else if (--unsent_[r] == 0) {
    offer(m.src, now, id);
  }
}

// A message has arrived completely; it may have to be decoded and reduced.
void Simulator::arrived(std::int32_t id, double now) {
  const Message &m = message(id);
  const double work =
      costs_.reduce * m.reduced + (m.src == m.dst ? 0 : costs_.decode * m.nbytes);
  if (work <= 0)
    return done(id, now);
  double &busy = adding_[static_cast<std::size_t>(m.dst)];
  busy = std::max(busy, now) + work;
  agenda_.add(busy, id, Event::Kind::done);
}

// Messages that waited only for this one are sent, if it is their turn.
void Simulator::done(std::int32_t id, double now) {
  Message &m = message(id);
  m.end = now;
  double &through = finished_[static_cast<std::size_t>(m.dst)];
  through = std::max(through, now);
  for (const std::int32_t next : order_.after(id)) {
    Message &after = message(next);
    if (--after.waits_for > 0)
      continue;
    if (costs_.streams) {
      leave(next, now, id);
      continue;
    }
    const auto r = static_cast<std::size_t>(after.src);
    if (turn_[r] < last_[r] &&
        message(order_.sent_by(r)[turn_[r]]).step == after.step)
      leave(next, now, id);
  }
}

} // namespace unisono::sim
