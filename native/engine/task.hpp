// A piece of work in flight, which can be advanced a little at a time by anybody.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include <poll.h>

#include "engine/recorder.hpp"
#include "memory/layout.hpp"

namespace unisono {

enum class Status { done, blocked, failed };

// How long one whose connection has ended is given the benefit of the doubt, in ns: if it is
// dead we shall be told so, and by what name.
constexpr std::int64_t word_of_death = 1'000'000'000;
// How long a stream may take to be attached that was opened by one who has since left.
constexpr std::int64_t on_its_way = 5'000'000'000;

// What a task waits for: that `rank` arrives at call `word`, or that its progress gets there.
struct Need {
  std::size_t rank;
  bool arrival;
  std::uint64_t word;
};

// Something to call once when a task has ended. It runs on whichever thread ended it,
// perhaps under that thread's locks: it must neither wait nor take Python's lock.
struct Hook {
  void (*call)(void *arg, int state);
  void *arg;
  Hook *next;
};

class Task {
public:
  enum State : std::uint32_t { pending, succeeded, broken };
  virtual ~Task();

  // Goes on as far as it can without waiting.
  virtual Status advance() = 0;
  // Whether it cannot end because this rank is gone.
  virtual bool hindered_by(std::size_t rank) const = 0;
  // What it is waiting for just now.
  virtual std::vector<Need> needs() const = 0;
  // Whether somebody on another host may be the one it waits for.
  virtual bool crosses_hosts() const { return false; }
  // The sockets it waits for; true if it waits for nothing else.
  virtual bool interests(std::vector<pollfd> &) const { return false; }

  // Writes down how it ended; then lets others see that it has. What tells of a call is
  // written in between, so that whoever has waited for it finds it.
  void finish(State how) {
    if (!pending_now())
      return; // another thread was faster
    close_record(how);
    publish(how);
  }
  void close_record(State how);
  void publish(State how);
  bool pending_now() const { return state.load(std::memory_order_acquire) == pending; }
  // Has `call` called once when this has ended, at once if it has.
  void when_done(void (*call)(void *arg, int state), void *arg);

  std::atomic<std::uint32_t> state = pending;
  Verdict verdict;
  std::vector<std::size_t> missed; // who was awaited when its time was up
  Record *record = nullptr;
  std::uint64_t record_id = 0;
  std::uint64_t seq = 0;
  std::uint64_t sends = 0; // bytes to other ranks, by the schedule
  std::uint64_t encoded = 0, decoded = 0; // bytes of codes that were made, and read
  std::uint64_t moved = 0; // counts what was done, so that waiting can begin anew
  std::int64_t timeout = 0;  // ns; 0: none
  std::int64_t waiting_since = 0;
  bool warned = false;
  std::uint64_t told_waiting = 0; // whom it said to other hosts that it waits for
  bool breaks_all = true; // its failure breaks the communicator, not only itself
  bool queued = false;    // set before others see it; only then can it have a hook

private:
  // A list that ends in null until this has ended; `fired` from then on. Whoever takes
  // the list out calls what is in it.
  static Hook fired;
  std::atomic<Hook *> hooks_ = nullptr;
};

} // namespace unisono
