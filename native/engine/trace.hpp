// The trace: what this rank does inside its calls, while it is enabled.
//
// Two rings of fixed-size entries, made when it is first enabled and never freed, so that
// writers need no lock: calls, and the moments that they consist of. Any thread may write.
// Disabled, it costs one relaxed load per place.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "engine/recorder.hpp"

namespace unisono {

// src/unisono/runtime/observe/tracing.py reads the same layout.
struct Moment {
  enum Kind : std::uint8_t {
    // from publishing its own arrival until all have arrived; peer: the last to arrive
    arrival,
    wait,    // for a peer, before an action
    copy,    // an action with one source
    reduce,  // an action with several
    pull,    // one source of an action that is another rank's: chunk from peer
    deliver, // a result written to a peer
    send,    // a message to a peer on another host
    // the part of an action that encoded its result; the duration is exact, the begin is
    // not
    encode,
    exit,    // until others have read what they need
    block    // the caller waits for a call that it began before
  };
  std::int64_t begin = 0, end = 0;
  std::uint64_t bytes = 0;
  std::uint32_t seq = 0; // the low 32 bits
  std::int32_t code = -1; // of an action: where in the window its code goes
  std::uint32_t communicator = 0;
  std::int32_t peer = -1;
  std::int32_t chunk = -1;
  std::int32_t action = -1; // of the program; those before arrival count too
  std::int32_t piece = 0;
  std::int32_t index = -1; // index in the peer's memory; of an action: in the window
  std::int32_t output = -1; // of an action: the chunk of the output that it writes
  Kind kind = arrival;
  std::uint8_t home = 0; // rows::Home
  std::uint8_t exposed = 0;
  std::uint8_t device = 0; // 1: of a call on a device, which are counted apart
};
static_assert(sizeof(Moment) == 64);

struct Called {
  Note note;
  std::int64_t created, begun, ended;
  std::uint64_t sent;
  std::uint32_t communicator;
  std::int32_t peer, tag;
  std::uint32_t site;
  std::uint32_t state;
  std::uint16_t queued; // 1: not on its caller's thread, or stream
  std::int16_t device;  // of a call on a device: its ordinal; else -1
  std::uint64_t stream; // of a call on a device
};
static_assert(sizeof(Called) == 256);

class Trace {
public:
  bool on() const {
    if (!on_.load(std::memory_order_relaxed))
      return false;
    std::atomic_thread_fence(std::memory_order_acquire); // the rings exist
    return true;
  }
  // The number of entries is fixed the first time.
  void start(std::size_t moments, std::size_t calls) {
    std::lock_guard lock(mutex_);
    if (!moments_.entries) {
      moments_.make(moments);
      calls_.make(calls);
    }
    made_.store(true, std::memory_order_release);
    on_.store(true, std::memory_order_release);
  }
  void stop() { on_.store(false, std::memory_order_release); }

  // Only while it is on.
  Moment &moment() { return moments_.next(); }
  Called &called() { return calls_.next(); }

  template <class Entry> struct Ring {
    std::unique_ptr<Entry[]> entries;
    std::size_t capacity = 0;
    std::atomic<std::uint64_t> count = 0;
    void make(std::size_t size) {
      entries = std::make_unique<Entry[]>(size);
      capacity = size;
    }
    Entry &next() {
      return entries[count.fetch_add(1, std::memory_order_relaxed) % capacity];
    }
  };
  const Ring<Moment> &moments() const { return moments_; }
  const Ring<Called> &calls() const { return calls_; }
  bool made() const { return made_.load(std::memory_order_acquire); }

private:
  std::atomic<bool> on_ = false, made_ = false;
  std::mutex mutex_;
  Ring<Moment> moments_;
  Ring<Called> calls_;
};

} // namespace unisono
