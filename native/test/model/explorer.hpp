// An explorer of all executions of a few threads under the memory model of C++.
//
// The code under test is the product's own, compiled with -fsanitize=thread: the compiler then
// turns every atomic operation into a call, and puts a call before every plain access. Here
// these calls do not go to ThreadSanitizer but to hooks.cpp, which hands them to an Explorer.
// The threads are coroutines of one process. Each stops before its next atomic operation, and
// the explorer decides which thread runs, and which of the allowed values a load returns,
// execution by execution, depth first, until all are explored. docs/protocol.md says what is
// modelled, what is not, and how equivalent executions are left out.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace model {

struct Options {
  bool reduce = true;     // false: every interleaving, to check the reduction against
  bool newest = false;    // loads return the newest value: sequential consistency
  bool timeouts = true;   // a sleep ends by itself; otherwise only when woken
  unsigned retries = 0;   // how often a wait that failed is tried again in one execution
  std::uint64_t most = 0; // executions, or 0: all
  std::string fault;      // the planted fault that is switched on
  std::uintptr_t weakened = 0; // the atomic operation whose order is taken to be relaxed
};

struct Report {
  std::uint64_t executions = 0; // all of the following
  std::uint64_t complete = 0;   // all threads ended
  std::uint64_t waiting = 0;    // a thread waits for a value that it reads in another execution
  std::uint64_t pruned = 0;     // equivalent to one that was explored
  std::uint64_t timeouts = 0;   // executions in which a sleep had to end by itself
  std::uint64_t events = 0, longest = 0;
  bool all = true; // false: stopped at Options::most
  std::string error;
  std::vector<std::string> trace; // the events that led to the error
  std::set<std::string> outcomes;
  std::map<std::uintptr_t, int> ordered; // operations with an order, by where they are called
};

// A scenario: `make` makes it again for each execution, before all threads run.
struct Scenario {
  std::vector<std::function<void()>> threads;
  std::function<void()> ended = [] {}; // called when all threads have ended
};
Report explore(const Options &options, const std::function<Scenario()> &make);

// For the threads of a scenario.
void check(bool holds, const char *what);
void outcome(const std::string &what);
bool planted(const char *fault);
// A wait has found nothing. The thread continues when a value that it has read since the last
// wait is newer; in the product it would see the new value then at the latest.
void await();
// For the trace; and memory in which plain accesses may race, because they are meant to.
void name(const volatile void *at, const std::string &what);
void may_race(const void *at, std::size_t bytes);

// For hooks.cpp.
enum class Kind : std::uint8_t {
  load, store, exchange, add, sub, compare, fence, lock, try_lock, unlock, sleep, wake
};
struct Op {
  Kind kind = Kind::load;
  std::uintptr_t at = 0;
  std::size_t size = 0;
  int order = __ATOMIC_SEQ_CST, failure = __ATOMIC_RELAXED;
  std::uint64_t operand = 0, expected = 0;
  std::uintptr_t site = 0;
};
struct Answer {
  std::uint64_t value = 0;
  bool done = false; // of compare, try_lock
};
Answer perform(Op op);
void access(std::uintptr_t at, std::size_t bytes, bool writes);
void *allocate(std::size_t bytes, std::size_t alignment); // null: not for the model
bool owns(const void *at);

} // namespace model
