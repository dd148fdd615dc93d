// Outstanding work, which any thread can advance step by step.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include <poll.h>

#include "engine/recorder.hpp"
#include "memory/layout.hpp"

namespace unisono {

enum class Status { done, blocked, failed };

// After a connection is lost: how long to wait for a death notice before the connection is
// reported as the failure, in ns.
constexpr std::int64_t death_notice_grace = 1'000'000'000;
// How long a stream that a closed rank opened may take to be attached, in ns.
constexpr std::int64_t attach_grace = 5'000'000'000;

// What a task waits for: the arrival of `rank` at call `word`, or its progress to `word`.
struct Need {
  std::size_t rank;
  bool arrival;
  std::uint64_t word;
};

// A function to call once when a task has ended. It runs on the thread that ended the task,
// perhaps under that thread's locks: it must not wait, nor take the interpreter lock.
struct Hook {
  void (*call)(void *arg, int state);
  void *arg;
  Hook *next;
};

class Task {
public:
  enum State : std::uint32_t { pending, succeeded, broken };
  virtual ~Task();

  // Advances as far as possible without waiting.
  virtual Status advance() = 0;
  // Whether it cannot complete if this rank is gone.
  virtual bool depends_on(std::size_t rank) const = 0;
  // What it is waiting for now.
  virtual std::vector<Need> needs() const = 0;
  // Whether it has not received all from a rank on another host.
  virtual bool expects_data_of(std::size_t) const { return false; }
  // Whether it may be waiting for a rank on another host.
  virtual bool crosses_hosts() const { return false; }
  // Takes back what other threads do for it: they no longer use its buffers, and it advances
  // without them.
  virtual void recall() {}
  // The sockets it waits for; true if it waits for nothing else.
  virtual bool poll_fds(std::vector<pollfd> &) const { return false; }
  // Called when it has ended, before that is visible.
  virtual void release_buffers() {}

  // Records how it ended, then makes that visible. What describes the call is written in
  // between, so that it is complete for the thread that waited.
  void finish(State how) {
    if (!pending_now())
      return; // another thread has completed it
    close_record(how);
    publish(how);
  }
  void close_record(State how);
  void publish(State how);
  bool pending_now() const { return state.load(std::memory_order_acquire) == pending; }
  // Calls `call` once when this has ended; at once if it has.
  void when_done(void (*call)(void *arg, int state), void *arg);

  std::atomic<std::uint32_t> state = pending;
  Failure failure;
  std::vector<std::size_t> late_ranks; // the ranks it waited for when it timed out
  Record *record = nullptr;
  std::uint64_t record_id = 0;
  std::uint64_t seq = 0;
  std::uint64_t sends = 0; // bytes to other ranks, by the schedule
  std::uint64_t encoded = 0, decoded = 0; // bytes of codes that were made, and read
  std::uint64_t moved = 0; // counts steps, so that a new wait is recognised
  std::int64_t timeout = 0;  // ns; 0: none
  std::int64_t waiting_since = 0;
  bool warned = false;
  std::uint64_t announced_wait = 0; // the wait that was announced to other hosts
  bool aborts_comm = true; // its failure aborts the communicator
  // set before it is visible to other threads; only then can it have a hook
  bool queued = false;

private:
  // A list that ends in null until this has ended; `fired` from then on. The thread that
  // takes the list out calls its hooks.
  static Hook fired;
  std::atomic<Hook *> hooks_ = nullptr;
};

} // namespace unisono
