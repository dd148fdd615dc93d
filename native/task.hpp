// A piece of work in flight, which can be advanced a little at a time by anybody.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "recorder.hpp"
#include "shared.hpp"

namespace unisono {

enum class Status { done, blocked, failed };

// What a task waits for: that `rank` arrives at call `word`, or that its progress gets there.
struct Need {
  std::size_t rank;
  bool arrival;
  std::uint64_t word;
};

class Task {
public:
  enum State : std::uint32_t { pending, succeeded, broken };
  virtual ~Task() = default;

  // Goes on as far as it can without waiting.
  virtual Status advance() = 0;
  // Whether it cannot end because this rank is gone.
  virtual bool hindered_by(std::size_t rank) const = 0;
  // What it is waiting for just now.
  virtual std::vector<Need> needs() const = 0;

  void finish(State how);
  bool pending_now() const { return state.load(std::memory_order_acquire) == pending; }

  std::atomic<std::uint32_t> state = pending;
  Verdict verdict;
  std::vector<std::size_t> missed; // who was awaited when its time was up
  Record *record = nullptr;
  std::uint64_t record_id = 0;
  std::uint64_t seq = 0;
  std::uint64_t moved = 0; // counts what was done, so that waiting can begin anew
  std::int64_t timeout = 0;  // ns; 0: none
  std::int64_t waiting_since = 0;
  bool warned = false;
  bool breaks_all = true; // its failure breaks the communicator, not only itself
};

} // namespace unisono
