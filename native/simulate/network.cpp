#include "simulate/network.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace unisono::sim {

namespace {
constexpr double never = std::numeric_limits<double>::infinity();
constexpr double close_enough = 1e-12; // rates that are the same
} // namespace

Network::Network(const std::vector<double> &bandwidth,
                 const std::vector<std::int64_t> &twins, double ratio, double duplex,
                 const std::vector<Message> &messages, Agenda &agenda)
    : ratio_(ratio), duplex_(duplex), messages_(messages), agenda_(agenda),
      carried_(bandwidth.size(), 0.0), links_(bandwidth.size()) {
  for (std::size_t k = 0; k < bandwidth.size(); ++k)
    links_[k].bandwidth = links_[k].room = bandwidth[k];
  for (std::size_t k = 0; k < twins.size(); ++k)
    links_[k].twin = static_cast<std::int32_t>(twins[k]);
}

bool Network::know(std::size_t count, const std::vector<std::int64_t> &first,
                   const std::vector<std::int64_t> &links,
                   const std::vector<double> &latency) {
  if (first.size() != count + 1 || latency.size() != count ||
      first.front() != 0 || first.back() != static_cast<std::int64_t>(links.size()) ||
      !std::is_sorted(first.begin(), first.end()))
    return false;
  const std::int64_t base = first_.back();
  for (std::size_t k = 0; k < count; ++k) {
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
  return true;
}

void Network::mark(std::int32_t at) {
  Link &link = links_[static_cast<std::size_t>(at)];
  if (link.dirty)
    return;
  link.dirty = true;
  dirty_.push_back(at);
}

// Updates the bandwidth of a link and its other direction when one becomes busy or idle.
void Network::other_way(Link &link) {
  if (link.twin < 0)
    return;
  Link &twin = links_[static_cast<std::size_t>(link.twin)];
  link.room = link.bandwidth * (twin.flows.empty() ? 1 : duplex_);
  twin.room = twin.bandwidth * (link.flows.empty() ? 1 : duplex_);
  if (!twin.flows.empty())
    mark(link.twin);
}

void Network::open(std::int32_t message, double now) {
  const Message &m = messages_[static_cast<std::size_t>(message)];
  Flow &flow = flows_[static_cast<std::size_t>(message)];
  const auto p = static_cast<std::size_t>(m.path);
  flow.left = m.src == m.dst ? 0 : m.nbytes * ratio_;
  flow.cap = path_cap_[p];
  flow.since = now;
  flow.rate = 0;
  if (flow.left <= 0 || first_[p] == first_[p + 1]) {
    flow.left = 0;
    agenda_.add(now, message, Event::Kind::drained, flow.version);
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
    if (link.saturated())
      mark(at);
  }
  ++open_flows_;
  fresh_.push_back(message);
}

void Network::close(std::int32_t message) {
  const Message &m = messages_[static_cast<std::size_t>(message)];
  Flow &flow = flows_[static_cast<std::size_t>(message)];
  const auto p = static_cast<std::size_t>(m.path);
  ++flow.version;
  if (flow.rate > 0) {
    --open_flows_;
    for (std::int64_t i = first_[p]; i < first_[p + 1]; ++i) {
      const std::int32_t at = path_links_[static_cast<std::size_t>(i)];
      Link &link = links_[static_cast<std::size_t>(at)];
      if (link.saturated())
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
}

void Network::settle(double now) {
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

// Collects all flows that a change may affect through saturated links, and those links.
void Network::gather() {
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
        if (!link.listed && link.saturated()) {
          link.listed = true;
          some_links_.push_back(at);
        }
      }
    }
  for (const std::int32_t at : some_links_)
    links_[static_cast<std::size_t>(at)].listed = false;
}

// Progressive filling: all rates grow equally until a link is full or a flow has the rate of
// its narrowest link; those flows stop, the others continue.
void Network::fill() {
  std::vector<std::int32_t> &links = filling_links_, &by_cap = filling_flows_;
  links.clear();
  for (const std::int32_t at : some_links_) {
    Link &link = links_[static_cast<std::size_t>(at)];
    if (!link.saturated())
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

// Fixes the rate of every flow that can have no more than `level`.
void Network::stop_at(double level, std::size_t next) {
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

void Network::stop(std::int32_t message, double level) {
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

void Network::apply(std::int32_t message, double rate, double now) {
  Flow &flow = flows_[static_cast<std::size_t>(message)];
  flow.left = std::max(0.0, flow.left - flow.rate * (now - flow.since));
  flow.since = now;
  flow.rate = rate;
  agenda_.add(now + flow.left / rate, message, Event::Kind::drained, ++flow.version);
}

} // namespace unisono::sim
