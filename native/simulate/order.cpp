#include "simulate/order.hpp"

#include <algorithm>

namespace unisono::sim {

Order::Order(std::int64_t n, std::int64_t num_slots, std::vector<double> sizes, bool streams)
    : n_(n), num_slots_(num_slots), sizes_(std::move(sizes)), streams_(streams),
      queue_(static_cast<std::size_t>(n)) {
  for (auto *slots : {&writers_, &readers_, &written_, &wrote_})
    slots->assign(static_cast<std::size_t>(n * num_slots), -1);
}

bool Order::add(const std::vector<Transfer> &step) {
  here_.clear();
  of_transfer_.clear();
  const std::size_t edges_before = edges_.size();
  for (const Transfer &t : step) {
    if (t.src < 0 || t.src >= n_ || t.dst < 0 || t.dst >= n_ || t.chunk < 0 ||
        t.chunk >= num_slots_ || t.into < 0 || t.into >= num_slots_)
      return false;
    const std::int32_t id = message_of(t.src * n_ + t.dst, steps_, t.reduces);
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

std::int32_t Order::message_of(std::int64_t pair, std::int32_t step, bool reduces) {
  const auto [joined, is_first] = here_.try_emplace(pair, -1);
  const bool alone = streams_ && !reduces;
  if (!alone && joined->second >= 0)
    return joined->second;
  const auto id = static_cast<std::int32_t>(messages_.size());
  if (!alone)
    joined->second = id;
  begin_message(pair, step, is_first);
  return id;
}

void Order::begin_message(std::int64_t pair, std::int32_t step, bool first) {
  Message m{};
  m.first = first;
  m.src = static_cast<std::int32_t>(pair / n_);
  m.dst = static_cast<std::int32_t>(pair % n_);
  m.step = step;
  m.path = path_to(pair);
  queue_[static_cast<std::size_t>(m.src)].push_back(
      static_cast<std::int32_t>(messages_.size()));
  messages_.push_back(m);
}

std::int32_t Order::path_to(std::int64_t pair) {
  const auto [known, is_new] =
      path_of_.try_emplace(pair, static_cast<std::int32_t>(path_of_.size()));
  if (is_new)
    unknown_.push_back(pair);
  return known->second;
}

void Order::wait(std::int32_t before, std::int32_t after) {
  if (before != after)
    edges_.push_back(Edge{before, after});
}

// Chunks of one message mostly wait for the same messages: each edge is added once.
void Order::thin_out(std::size_t from) {
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

// A read waits for the last earlier step that wrote the slot.
void Order::reads(const std::vector<Transfer> &step) {
  for (std::size_t i = 0; i < step.size(); ++i) {
    const Transfer &t = step[i];
    const std::int32_t id = of_transfer_[i];
    for (auto c = writers_[static_cast<std::size_t>(t.chunk * n_ + t.src)]; c >= 0;
         c = cells_[static_cast<std::size_t>(c)].next)
      wait(cells_[static_cast<std::size_t>(c)].message, id);
  }
}

// A write waits for all earlier writes and reads of the slot.
void Order::writes(const std::vector<Transfer> &step) {
  for (std::size_t i = 0; i < step.size(); ++i) {
    const auto slot = static_cast<std::size_t>(step[i].into * n_ + step[i].dst);
    for (const auto *heads : {&writers_, &readers_})
      for (auto c = (*heads)[slot]; c >= 0; c = cells_[static_cast<std::size_t>(c)].next)
        wait(cells_[static_cast<std::size_t>(c)].message, of_transfer_[i]);
    written_[slot] = steps_;
  }
}

// Records the writers and readers of slots; a read in the step of a write sees the old value.
void Order::note(const std::vector<Transfer> &step) {
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

void Order::push(std::vector<std::int32_t> &head, std::int64_t slot,
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

void Order::drop(std::vector<std::int32_t> &head, std::int64_t slot) {
  std::int32_t &first = head[static_cast<std::size_t>(slot)];
  while (first >= 0) {
    Cell &cell = cells_[static_cast<std::size_t>(first)];
    const std::int32_t next = cell.next;
    cell.next = spare_;
    spare_ = first;
    first = next;
  }
}

std::vector<std::int64_t> Order::edges() const {
  std::vector<std::int64_t> found;
  const auto count = static_cast<std::int64_t>(messages_.size());
  for (const Edge &edge : edges_)
    found.push_back(edge.before * count + edge.after);
  return found;
}

void Order::complete() {
  link_edges();
  if (streams_)
    link_streams();
}

void Order::link_edges() {
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

// A message is sent after the previous one to the same rank.
void Order::link_streams() {
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

} // namespace unisono::sim
