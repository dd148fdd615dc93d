// The flight recorder: the last calls of this process, always on.
//
// A ring that any thread may write to. A record is a copy, so it outlives its call; one
// that is overwritten while it is read is torn in one entry, and nothing else is affected.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "memory/layout.hpp"
#include "support/clock.hpp"

namespace unisono {

struct Record {
  // Captured: for a graph, which may run it any number of times.
  enum State : std::uint32_t { scheduled, started, completed, failed, captured };
  Note note;
  std::int64_t created = 0, begun = 0, ended = 0;
  std::uint64_t id = 0;
  std::uint64_t communicator = 0;
  std::uint64_t encoded = 0, decoded = 0; // bytes of codes
  std::int32_t peer = -1, tag = 0;
  std::uint32_t site = 0; // where Python called, if enabled: bindings/call_sites.hpp
  std::atomic<std::uint32_t> state = scheduled;
  std::int32_t device = -1; // of a call on a CUDA device: its ordinal; the rest is of those
  bool timed = false;       // begun and ended are by the device's clock, not as they were found
  std::uint64_t stream = 0;
};

class Recorder {
public:
  static constexpr std::size_t capacity = 2000;
  Recorder() : ring_(capacity) {}

  Record &begin(const Note &note, std::uint64_t communicator, std::int64_t now) {
    const std::uint64_t id = next_.fetch_add(1, std::memory_order_relaxed);
    Record &r = ring_[id % capacity];
    r.note = note;
    r.created = now;
    r.begun = r.ended = 0;
    r.encoded = r.decoded = 0;
    r.id = id + 1;
    r.communicator = communicator;
    r.peer = -1;
    r.site = 0;
    r.device = -1;
    r.state.store(Record::scheduled, std::memory_order_relaxed);
    return r;
  }
  const std::vector<Record> &ring() const { return ring_; }
  std::uint64_t count() const { return next_.load(std::memory_order_relaxed); }

  // Who knows of calls that have ended only when asked is asked before records are read.
  void add_source(const void *owner, std::function<void()> look) {
    const std::lock_guard lock(mutex_);
    sources_[owner] = std::move(look);
  }
  void remove_source(const void *owner) {
    const std::lock_guard lock(mutex_);
    sources_.erase(owner);
  }
  void ask_sources() {
    const std::lock_guard lock(mutex_);
    for (const auto &[owner, look] : sources_)
      look();
  }

private:
  std::vector<Record> ring_;
  std::atomic<std::uint64_t> next_ = 0;
  std::mutex mutex_;
  std::map<const void *, std::function<void()>> sources_;
};

} // namespace unisono
