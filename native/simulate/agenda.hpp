// A queue of events, the earliest first.
//
// A flow whose rate changes drains at another time than predicted. The old event stays in
// the queue, with the version of the rate that it was predicted for, and is skipped. Such
// outdated events are removed when they are many.

#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

namespace unisono::sim {

struct Event {
  enum class Kind : std::uint8_t { start, drained, arrived, done };
  double time;
  std::int32_t message;
  std::uint32_t version; // of the rate that `drained` was predicted for
  Kind kind;
  bool operator>(const Event &other) const {
    return time != other.time ? time > other.time : message > other.message;
  }
};

class Agenda {
public:
  bool empty() const { return events_.empty(); }
  double soonest() const { return events_.front().time; }
  void add(double time, std::int32_t message, Event::Kind kind, std::uint32_t version = 0) {
    events_.push_back({time, message, version, kind});
    std::push_heap(events_.begin(), events_.end(), std::greater<>{});
  }
  Event take() {
    std::pop_heap(events_.begin(), events_.end(), std::greater<>{});
    const Event event = events_.back();
    events_.pop_back();
    return event;
  }
  // Removes outdated events when there may be many.
  template <class Stale> void forget(Stale stale) {
    constexpr std::size_t fewest = 1 << 16;
    if (events_.size() < std::max(fewest, 2 * kept_))
      return;
    std::erase_if(events_, stale);
    std::make_heap(events_.begin(), events_.end(), std::greater<>{});
    kept_ = events_.size();
  }

private:
  std::vector<Event> events_;
  std::size_t kept_ = 0; // number of events after the last removal
};

} // namespace unisono::sim
