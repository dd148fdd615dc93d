#include "test/model/explorer.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include <setjmp.h>
#include <ucontext.h>

namespace model {

namespace {

constexpr int max_threads = 5;
constexpr int max_locations = 384;
constexpr int no_thread = -1; // no thread runs: the scenario is made, or checked at the end

using Clock = std::array<std::uint32_t, max_threads>;

bool knows(const Clock &clock, int thread, std::uint32_t count) {
  return clock[std::size_t(thread)] >= count;
}

void join(Clock &into, const Clock &from) {
  for (std::size_t t = 0; t < max_threads; ++t)
    into[t] = std::max(into[t], from[t]);
}

// For each location, the oldest store that may still be read: an index into its stores.
using Seen = std::array<std::uint16_t, max_locations>;

// The view of a thread: the events that happened before, and the oldest stores it may read.
struct View {
  Clock clock{};
  Seen seen{};
};

bool acquires(int order) {
  return order == __ATOMIC_ACQUIRE || order == __ATOMIC_CONSUME || order == __ATOMIC_ACQ_REL ||
         order == __ATOMIC_SEQ_CST;
}
bool releases(int order) {
  return order == __ATOMIC_RELEASE || order == __ATOMIC_ACQ_REL || order == __ATOMIC_SEQ_CST;
}
bool writes(Kind kind) { return kind != Kind::load && kind != Kind::fence; }
bool is_atomic(Kind kind) { return kind <= Kind::fence; }
bool in_total_order(const Op &op) {
  return is_atomic(op.kind) && op.order == __ATOMIC_SEQ_CST;
}

struct Store {
  std::uint64_t value;
  View view; // the view that a read with acquire takes over
  int event; // -1: the value at the beginning
};

struct Location {
  std::uintptr_t at;
  std::vector<Store> stores; // in modification order, which is that of execution
  std::vector<int> events;
};

struct Event {
  int thread;
  std::uint32_t count; // of its thread
  Op op;
  int location; // -1: a fence
  int store;    // read, or made
  Clock order;  // the events that cannot come after it in an equivalent execution
};

struct Thread {
  enum State { stopped, waiting, sleeping, over };
  std::function<void()> run;
  std::unique_ptr<std::byte[]> stack;
  ucontext_t first;
  jmp_buf where;
  bool begun = false;
  bool woken = false; // from sleep, by another thread
  State state = stopped;
  Op op; // its next operation, if it is stopped
  Answer answer;
  View now;
  View released, acquired;                    // by fences: for later stores, from earlier loads
  std::vector<std::pair<int, int>> looked_at; // location and store, since the last wait
  unsigned retries = 0;
  Clock order{};
  std::uint32_t events = 0;
};

// One decision of an execution: which thread runs next, and which store it reads.
struct Sleep { // of a thread whose next operation has been explored from here
  bool fast = false; // nothing has happened since that could change it
  int least = 0;     // or: it must read one of the stores that were added since
};
struct Node {
  int thread = 0;
  std::vector<int> choices;
  std::size_t choice = 0;
  unsigned enabled = 0, backtrack = 0, done = 0;
  std::array<Sleep, max_threads> sleep{};
};

// Plain accesses to four bytes; those of other executions are ignored.
struct Cell {
  std::uint64_t execution = 0;
  int writer = no_thread;
  std::uint32_t written = 0;
  Clock read{};
};

unsigned bit(int thread) { return 1u << thread; }

const char *const kind_names[] = {"load", "store", "exchange", "add", "sub", "compare",
                                  "fence", "lock", "try_lock", "unlock", "sleep", "wake"};
const char *const order_names[] = {"relaxed", "consume", "acquire",
                                   "release", "acq_rel", "seq_cst"};

// Memory of an execution: a part for the scenario and one for each thread, so that addresses
// do not depend on the order of the threads. Nothing is freed before the end.
class Arena {
public:
  Arena() {
    base_ = static_cast<std::byte *>(std::aligned_alloc(4096, all));
    if (base_ == nullptr)
      std::abort();
    std::memset(base_, 0, all);
    clear();
  }
  ~Arena() { std::free(base_); }
  Arena(const Arena &) = delete;
  Arena &operator=(const Arena &) = delete;
  void clear() {
    for (int part = 0; part <= max_threads; ++part) {
      std::memset(base_ + begin(part), 0, used_[std::size_t(part)]);
      used_[std::size_t(part)] = 0;
    }
  }
  void *allocate(int thread, std::size_t bytes, std::size_t alignment) {
    const int part = thread + 1;
    std::size_t &used = used_[std::size_t(part)];
    used = (used + alignment - 1) / alignment * alignment;
    void *at = base_ + begin(part) + used;
    used += bytes;
    if (used > (part == 0 ? common : own)) {
      std::fputs("the memory of the model is too small\n", stderr);
      std::abort();
    }
    return at;
  }
  bool owns(std::uintptr_t at) const { return at - std::uintptr_t(base_) < all; }
  std::size_t offset(std::uintptr_t at) const { return at - std::uintptr_t(base_); }
  static constexpr std::size_t common = 512 << 10, own = 128 << 10;
  static constexpr std::size_t all = common + max_threads * own;

private:
  static std::size_t begin(int part) {
    return part == 0 ? 0 : common + std::size_t(part - 1) * own;
  }
  std::byte *base_;
  std::array<std::size_t, max_threads + 1> used_{};
};

// On memory that no other thread uses.
Answer direct(const Op &op) {
  std::uint64_t value = 0;
  void *at = reinterpret_cast<void *>(op.at);
  if (op.kind != Kind::fence)
    std::memmove(&value, at, op.size);
  std::uint64_t made = op.operand;
  bool done = true;
  switch (op.kind) {
  case Kind::load:
  case Kind::fence:
  case Kind::wake:
  case Kind::sleep:
    return {value, true};
  case Kind::add:
    made = value + op.operand;
    break;
  case Kind::sub:
    made = value - op.operand;
    break;
  case Kind::compare:
    done = value == op.expected;
    break;
  case Kind::try_lock:
    done = value == 0;
    break;
  default:
    break;
  }
  if (done)
    std::memmove(at, &made, op.size);
  return {value, done};
}

class Explorer {
public:
  Explorer(const Options &options, const std::function<Scenario()> &make)
      : options_(options), make_(make), cells_(Arena::all / 4) {}
  Report explore();

  Answer perform(const Op &op);
  void access(std::uintptr_t at, std::size_t bytes, bool writes);
  void await();
  void fail(const std::string &what);
  bool running() const { return current_ != no_thread; }
  bool planted(const char *fault) const { return options_.fault == fault; }
  void *allocate(std::size_t bytes, std::size_t alignment) {
    return inside_ ? arena_.allocate(current_, bytes, alignment) : nullptr;
  }
  void *memory(std::size_t bytes) { return arena_.allocate(current_, bytes, 16); }
  bool owns(const void *at) const { return arena_.owns(std::uintptr_t(at)); }
  // While the explorer's own code runs, memory is allocated from the process.
  struct Outside {
    explicit Outside(Explorer &explorer) : explorer(explorer), before(explorer.inside_) {
      explorer.inside_ = false;
    }
    ~Outside() { explorer.inside_ = before; }
    Explorer &explorer;
    bool before;
  };
  Report report;
  std::map<std::uintptr_t, std::string> names;
  struct Racing { // memory in which plain accesses may race
    std::uintptr_t at;
    std::size_t bytes;
    std::uintptr_t word; // each access to it is a relaxed operation
  };
  std::vector<Racing> may_race;

private:
  void execute();
  void begin();
  void finish();
  bool next();
  void resume(int thread);
  void stop();
  static void enter();
  void wake_up();
  unsigned enabled() const;
  bool hung(const Thread &thread) const;
  bool has_news(const Thread &thread) const;
  bool is_old(const Thread &thread, const std::pair<int, int> &look) const;

  std::vector<int> choices(int thread, int least);
  void happen(int thread, int choice);
  Answer apply(Thread &thread, Event &event, int choice);
  void read(Thread &thread, const Event &event, int order);
  void write(Thread &thread, Event &event, std::uint64_t value);
  void fence(Thread &thread, int order);
  void learn(View &into, const View &from) const;
  bool race_as_meant(std::uintptr_t at);
  int location(const Op &op);
  bool is_private(const Op &op);
  void note(const Op &op);

  bool reversible(const Event &earlier, const Event &later) const;
  void order(int event);
  void race(int earlier, int later);
  std::array<Sleep, max_threads> asleep_after(const Node &node, const Event &event) const;
  std::string describe(const Event &event) const;
  std::string name_of(std::uintptr_t at) const;

  Options options_;
  const std::function<Scenario()> &make_;
  Arena arena_;
  std::vector<Cell> cells_;
  std::vector<std::unique_ptr<std::byte[]>> stacks_;
  std::vector<Node> stack_;

  // Of this execution.
  Scenario scenario_;
  std::vector<Thread> threads_;
  std::vector<Location> locations_;
  std::unordered_map<std::uintptr_t, int> where_;
  std::vector<Event> events_;
  std::vector<int> total_order_;
  Seen total_seen_{};
  std::uint64_t execution_ = 0;
  std::size_t fresh_ = 0; // the first decision that is new in this execution
  bool timed_out_ = false;
  bool idle_ = false; // the rest of this execution has nothing new

  // An atomic that only one thread uses needs no decisions. If another thread uses it, the
  // exploration restarts.
  std::unordered_map<std::uintptr_t, int> owner_;
  std::unordered_set<std::uintptr_t> shared_;
  bool again_ = false;

  int current_ = no_thread;
  bool inside_ = false;
  jmp_buf scheduler_;
};

Explorer *explorer = nullptr;

constexpr std::size_t stack_bytes = 256 << 10;

Report Explorer::explore() {
  do {
    if (again_) {
      again_ = false;
      const auto ordered = report.ordered;
      report = {};
      report.ordered = ordered;
      stack_.clear();
      fresh_ = 0;
    }
    do {
      execute();
    } while (!again_ && report.error.empty() && next());
  } while (again_);
  return report;
}

// Goes back to the last decision that has an unexplored alternative.
bool Explorer::next() {
  if (options_.most != 0 && report.executions >= options_.most) {
    report.all = false;
    return false;
  }
  for (; !stack_.empty(); stack_.pop_back()) {
    Node &node = stack_.back();
    fresh_ = stack_.size() - 1;
    if (++node.choice < node.choices.size())
      return true;
    node.done |= bit(node.thread);
    unsigned rest = node.backtrack & ~node.done;
    for (std::size_t t = 0; t < threads_.size(); ++t)
      if (node.sleep[t].fast)
        rest &= ~bit(int(t));
    if (rest != 0) {
      node.thread = __builtin_ctz(rest);
      node.choices.clear();
      node.choice = 0;
      return true;
    }
  }
  return false;
}

void Explorer::begin() {
  scenario_ = {};
  threads_.clear();
  locations_.clear();
  where_.clear();
  events_.clear();
  total_order_.clear();
  total_seen_ = {};
  names.clear();
  may_race.clear();
  timed_out_ = idle_ = false;
  arena_.clear();
  ++report.executions;
  ++execution_;
  inside_ = true;
  scenario_ = make_();
  inside_ = false;
  threads_.resize(scenario_.threads.size());
  while (stacks_.size() < threads_.size())
    stacks_.push_back(std::make_unique<std::byte[]>(stack_bytes));
  for (std::size_t t = 0; t < threads_.size(); ++t) {
    threads_[t].run = scenario_.threads[t];
    threads_[t].retries = options_.retries;
    threads_[t].now.clock[t] = 1;
    resume(int(t));
  }
}

void Explorer::execute() {
  begin();
  std::array<Sleep, max_threads> sleep{};
  int last = 0;
  for (std::size_t depth = 0; !again_ && report.error.empty(); ++depth) {
    wake_up();
    if (idle_) {
      ++report.pruned;
      return;
    }
    const unsigned able = enabled();
    if (able == 0)
      return finish();
    if (depth == stack_.size()) {
      unsigned open = able;
      for (std::size_t t = 0; t < threads_.size(); ++t)
        if (sleep[t].fast)
          open &= ~bit(int(t));
      if (open == 0) {
        ++report.pruned;
        return;
      }
      Node node;
      node.thread = (open & bit(last)) != 0 ? last : __builtin_ctz(open);
      node.enabled = able;
      node.backtrack = options_.reduce ? bit(node.thread) : able;
      node.sleep = sleep;
      stack_.push_back(std::move(node));
    }
    Node &node = stack_[depth];
    if (node.choices.empty())
      node.choices = choices(node.thread, node.sleep[std::size_t(node.thread)].least);
    last = node.thread;
    happen(node.thread, node.choices[node.choice]);
    if (options_.reduce) {
      order(int(depth));
      sleep = asleep_after(stack_[depth], events_.back());
    }
    ++report.events;
    report.longest = std::max<std::uint64_t>(report.longest, events_.size());
    if (threads_[std::size_t(last)].state == Thread::stopped)
      resume(last);
  }
}

void Explorer::finish() {
  bool all_over = true, all_hung = true;
  for (const Thread &thread : threads_) {
    all_over = all_over && thread.state == Thread::over;
    all_hung = all_hung && (thread.state == Thread::over || hung(thread));
  }
  report.timeouts += timed_out_;
  if (all_over) {
    ++report.complete;
    inside_ = true;
    scenario_.ended();
    inside_ = false;
  } else if (all_hung) {
    fail("threads wait for ever");
  } else {
    ++report.waiting;
  }
}

// Whether the thread would wait for ever if no other thread ran.
bool Explorer::hung(const Thread &thread) const {
  if (thread.state == Thread::sleeping && !options_.timeouts)
    return true;
  return thread.state == Thread::stopped || !has_news(thread);
}

// Whether another thread has stored something since.
bool Explorer::is_old(const Thread &thread, const std::pair<int, int> &look) const {
  const auto &stores = locations_[std::size_t(look.first)].stores;
  return std::any_of(stores.begin() + look.second + 1, stores.end(), [&](const Store &store) {
    return &threads_[std::size_t(events_[std::size_t(store.event)].thread)] != &thread;
  });
}

bool Explorer::has_news(const Thread &thread) const {
  return std::any_of(thread.looked_at.begin(), thread.looked_at.end(),
                     [&](const auto &look) { return is_old(thread, look); });
}

// Waiting threads continue to their next operation when a value that they read has changed.
void Explorer::wake_up() {
  for (std::size_t t = 0; t < threads_.size(); ++t) {
    Thread &thread = threads_[t];
    const bool asleep = thread.state == Thread::sleeping;
    if (thread.state != Thread::waiting && !(asleep && options_.timeouts))
      continue;
    if (!thread.woken && (thread.retries == 0 || !has_news(thread)))
      continue;
    timed_out_ = timed_out_ || asleep;
    thread.retries -= thread.woken ? 0 : 1;
    thread.woken = false;
    for (const auto &[at, store] : thread.looked_at) {
      const auto &stores = locations_[std::size_t(at)].stores;
      if (int(stores.size()) - 1 > store && stores[std::size_t(store) + 1].event >= 0)
        join(thread.order, events_[std::size_t(stores[std::size_t(store) + 1].event)].order);
    }
    thread.looked_at.clear();
    resume(int(t));
  }
}

unsigned Explorer::enabled() const {
  unsigned able = 0;
  for (std::size_t t = 0; t < threads_.size(); ++t) {
    const Thread &thread = threads_[t];
    if (thread.state != Thread::stopped)
      continue;
    if (thread.op.kind == Kind::lock) {
      const auto found = where_.find(thread.op.at);
      if (found != where_.end() &&
          locations_[std::size_t(found->second)].stores.back().value != 0)
        continue;
    }
    able |= bit(int(t));
  }
  return able;
}

// Threads are coroutines: makecontext starts them, then jumps switch without a system call.
void Explorer::enter() {
  Explorer &self = *explorer;
  const auto me = std::size_t(self.current_);
  self.inside_ = true;
  self.threads_[me].run();
  self.threads_[me].state = Thread::over;
  self.stop();
}

void Explorer::resume(int thread) {
  Thread &next = threads_[std::size_t(thread)];
  current_ = thread;
  next.state = Thread::stopped;
  if (_setjmp(scheduler_) == 0) {
    inside_ = true;
    if (next.begun)
      _longjmp(next.where, 1);
    next.begun = true;
    ::getcontext(&next.first);
    next.first.uc_stack.ss_sp = stacks_[std::size_t(thread)].get();
    next.first.uc_stack.ss_size = stack_bytes;
    next.first.uc_link = nullptr;
    ::makecontext(&next.first, &Explorer::enter, 0);
    ::setcontext(&next.first);
  }
  inside_ = false;
  current_ = no_thread;
}

void Explorer::stop() {
  if (_setjmp(threads_[std::size_t(current_)].where) == 0)
    _longjmp(scheduler_, 1);
}

Answer Explorer::perform(const Op &given) {
  Op op = given;
  if (op.kind != Kind::fence && !arena_.owns(op.at))
    return direct(op);
  if (!running())
    return direct(op);
  const Outside outside(*this);
  if (op.site == options_.weakened && is_atomic(op.kind))
    op.order = op.failure = __ATOMIC_RELAXED;
  note(op);
  if (op.kind != Kind::fence && is_private(op))
    return direct(op);
  const auto me = std::size_t(current_);
  threads_[me].op = op;
  stop();
  return threads_[me].answer;
}

void Explorer::note(const Op &op) {
  if (is_atomic(op.kind) && op.order != __ATOMIC_RELAXED)
    report.ordered.emplace(op.site, op.order);
}

bool Explorer::is_private(const Op &op) {
  if (shared_.contains(op.at))
    return false;
  if (owner_.emplace(op.at, current_).first->second == current_ && op.kind != Kind::sleep)
    return true;
  shared_.insert(op.at);
  again_ = true;
  stop(); // it does not continue
  return false;
}

int Explorer::location(const Op &op) {
  if (op.kind == Kind::fence)
    return -1;
  const auto [found, is_new] = where_.emplace(op.at, int(locations_.size()));
  if (is_new) {
    if (locations_.size() == max_locations)
      std::abort();
    Location place{op.at, {}, {}};
    std::uint64_t value = 0;
    std::memmove(&value, reinterpret_cast<void *>(op.at), op.size);
    place.stores.push_back({value, {}, -1});
    locations_.push_back(std::move(place));
  }
  return found->second;
}

// The stores that an operation may read, the newest first. Operations other than loads read
// the newest only, except that a comparison may also fail by an older value.
std::vector<int> Explorer::choices(int thread, int least) {
  const Thread &who = threads_[std::size_t(thread)];
  const Op &op = who.op;
  const int at = location(op);
  if (at < 0)
    return {0};
  const auto &stores = locations_[std::size_t(at)].stores;
  const int newest = int(stores.size()) - 1;
  if (op.kind != Kind::load && op.kind != Kind::compare)
    return {newest};
  int oldest = who.now.seen[std::size_t(at)];
  if (in_total_order(op))
    oldest = std::max<int>(oldest, total_seen_[std::size_t(at)]);
  if (options_.newest)
    oldest = newest;
  if (op.kind == Kind::load)
    oldest = std::max(oldest, least);
  std::vector<int> found;
  for (int s = newest; s >= oldest; --s)
    if (op.kind == Kind::load || s == newest || stores[std::size_t(s)].value != op.expected)
      found.push_back(s);
  return found;
}

void Explorer::happen(int thread, int choice) {
  Thread &who = threads_[std::size_t(thread)];
  Event event{thread, ++who.events, who.op, location(who.op), choice, {}};
  who.answer = apply(who, event, choice);
  if (event.location >= 0)
    locations_[std::size_t(event.location)].events.push_back(int(events_.size()));
  if (in_total_order(event.op))
    total_order_.push_back(int(events_.size()));
  events_.push_back(event);
  ++who.now.clock[std::size_t(thread)];
}

Answer Explorer::apply(Thread &thread, Event &event, int choice) {
  const Op &op = event.op;
  if (op.kind == Kind::fence) {
    fence(thread, op.order);
    return {};
  }
  const std::uint64_t value =
      locations_[std::size_t(event.location)].stores[std::size_t(choice)].value;
  switch (op.kind) {
  case Kind::load:
    read(thread, event, op.order);
    return {value, true};
  case Kind::store:
  case Kind::unlock:
    write(thread, event, op.operand);
    return {value, true};
  case Kind::compare:
    if (value != op.expected) {
      read(thread, event, op.failure);
      return {value, false};
    }
    break;
  case Kind::try_lock:
    if (value != 0)
      return {value, false};
    break;
  case Kind::sleep:
    if (value == op.expected)
      thread.state = Thread::sleeping;
    return {value, true};
  case Kind::wake:
    for (Thread &other : threads_)
      if (other.state == Thread::sleeping && other.op.at == op.at) {
        other.state = Thread::waiting;
        other.woken = true;
      }
    return {value, true};
  default:
    break;
  }
  const std::uint64_t made = op.kind == Kind::add   ? value + op.operand
                             : op.kind == Kind::sub ? value - op.operand
                                                    : op.operand;
  read(thread, event, op.order);
  write(thread, event, op.size == 8 ? made : made & ((std::uint64_t(1) << 8 * op.size) - 1));
  return {value, true};
}

void Explorer::learn(View &into, const View &from) const {
  join(into.clock, from.clock);
  for (std::size_t l = 0; l < locations_.size(); ++l)
    into.seen[l] = std::max(into.seen[l], from.seen[l]);
}

void Explorer::read(Thread &thread, const Event &event, int order) {
  const auto at = std::size_t(event.location);
  const Store &store = locations_[at].stores[std::size_t(event.store)];
  const auto index = std::uint16_t(event.store);
  thread.looked_at.emplace_back(event.location, event.store);
  learn(thread.acquired, store.view);
  if (acquires(order))
    learn(thread.now, store.view);
  thread.now.seen[at] = std::max(thread.now.seen[at], index);
  if (in_total_order(event.op))
    total_seen_[at] = std::max(total_seen_[at], index);
}

void Explorer::write(Thread &thread, Event &event, std::uint64_t value) {
  const auto at = std::size_t(event.location);
  Location &place = locations_[at];
  const auto index = std::uint16_t(place.stores.size());
  const Kind kind = event.op.kind;
  const bool goes_on = kind != Kind::store && kind != Kind::unlock; // a release sequence
  const View *before = goes_on ? &place.stores.back().view : nullptr;
  thread.now.seen[at] = index;
  View view = releases(event.op.order) ? thread.now : thread.released;
  if (before != nullptr)
    learn(view, *before);
  view.seen[at] = index;
  place.stores.push_back({value, view, int(events_.size())});
  event.store = index;
  std::memmove(reinterpret_cast<void *>(place.at), &value, event.op.size);
  if (in_total_order(event.op))
    total_seen_[at] = index;
}

void Explorer::fence(Thread &thread, int order) {
  if (acquires(order))
    learn(thread.now, thread.acquired);
  if (order == __ATOMIC_SEQ_CST)
    for (std::size_t l = 0; l < locations_.size(); ++l)
      thread.now.seen[l] = total_seen_[l] = std::max(thread.now.seen[l], total_seen_[l]);
  if (releases(order))
    thread.released = thread.now;
}

// Whether two events of different threads may have another result in the other order. A store
// and a later load need not be reversed, since the load may read an older value, unless it
// must read the newest.
bool Explorer::reversible(const Event &earlier, const Event &later) const {
  const bool total = in_total_order(earlier.op) && in_total_order(later.op);
  if (earlier.location < 0 || later.location < 0)
    return total;
  if (earlier.location != later.location)
    return false;
  return writes(later.op.kind) || total || (options_.newest && writes(earlier.op.kind));
}

// Finds the events that race with the new one, and schedules the other order.
void Explorer::order(int at) {
  Event &event = events_[std::size_t(at)];
  Thread &thread = threads_[std::size_t(event.thread)];
  Clock reach = thread.order;
  std::vector<int> before, races;
  if (event.location >= 0)
    before = locations_[std::size_t(event.location)].events;
  if (in_total_order(event.op))
    before.insert(before.end(), total_order_.begin(), total_order_.end());
  std::sort(before.begin(), before.end(), std::greater<>());
  before.erase(std::unique(before.begin(), before.end()), before.end());
  const bool lock = event.op.kind == Kind::lock;
  for (const int b : before) {
    const Event &earlier = events_[std::size_t(b)];
    if (b == at || earlier.thread == event.thread || !reversible(earlier, event))
      continue;
    const bool unlock = earlier.op.kind == Kind::unlock;
    if (!knows(lock ? thread.order : reach, earlier.thread, earlier.count) && !(lock && unlock))
      races.push_back(b);
    join(reach, earlier.order);
  }
  if (event.location >= 0) { // the store that it reads comes before it
    const auto &stores = locations_[std::size_t(event.location)].stores;
    const int from = event.store - (stores[std::size_t(event.store)].event == at ? 1 : 0);
    if (const int store = stores[std::size_t(from)].event; store >= 0 && from >= 0)
      join(reach, events_[std::size_t(store)].order);
  }
  reach[std::size_t(event.thread)] = event.count;
  event.order = thread.order = reach;
  for (Thread &other : threads_)
    if (other.woken)
      join(other.order, reach);
  if (std::size_t(at) >= fresh_)
    for (const int b : races)
      race(b, at);
}

// Before `earlier`, a thread must be tried that runs events that do not depend on it and that
// lead to `later`.
void Explorer::race(int earlier, int later) {
  const Event &first = events_[std::size_t(earlier)];
  Node &node = stack_[std::size_t(earlier)];
  std::vector<int> apart;
  for (int j = earlier + 1; j < later; ++j)
    if (!knows(events_[std::size_t(j)].order, first.thread, first.count))
      apart.push_back(j);
  apart.push_back(later);
  unsigned seen = 0, initials = 0;
  for (std::size_t j = 0; j < apart.size(); ++j) {
    const Event &event = events_[std::size_t(apart[j])];
    if ((seen & bit(event.thread)) != 0)
      continue;
    seen |= bit(event.thread);
    bool first_of_all = true;
    for (std::size_t g = 0; g < j && first_of_all; ++g) {
      const Event &before = events_[std::size_t(apart[g])];
      first_of_all = !knows(event.order, before.thread, before.count);
    }
    if (first_of_all)
      initials |= bit(event.thread);
  }
  if ((node.backtrack & initials) != 0)
    return;
  const unsigned possible = initials & node.enabled;
  const int wanted = events_[std::size_t(later)].thread;
  if (possible == 0)
    node.backtrack |= node.enabled;
  else
    node.backtrack |= (possible & bit(wanted)) != 0 ? bit(wanted) : bit(__builtin_ctz(possible));
}

// An operation that was explored from this decision need not be explored again after it, until
// an event that affects it happens.
std::array<Sleep, max_threads> Explorer::asleep_after(const Node &node,
                                                      const Event &event) const {
  std::array<Sleep, max_threads> after{};
  for (std::size_t t = 0; t < threads_.size(); ++t) {
    Sleep sleep = node.sleep[t];
    if ((node.done & bit(int(t))) != 0)
      sleep = {true, 0};
    if (int(t) == event.thread || (!sleep.fast && sleep.least == 0))
      continue;
    const Op &op = threads_[t].op;
    const bool total = in_total_order(op) && in_total_order(event.op);
    const bool same = op.kind != Kind::fence && op.at == event.op.at && event.location >= 0;
    const bool either_fence = op.kind == Kind::fence || event.location < 0;
    if (total && (same || either_fence))
      continue;
    if (same && writes(event.op.kind) && writes(op.kind))
      continue;
    if (same && options_.newest && (writes(event.op.kind) || writes(op.kind)))
      continue;
    if (same && writes(event.op.kind) && sleep.fast)
      sleep = {false, event.store};
    after[t] = sleep;
  }
  return after;
}

void Explorer::await() {
  if (!running())
    return;
  Thread &me = threads_[std::size_t(current_)];
  me.state = Thread::waiting;
  const Outside outside(*this);
  // The thread does not continue in this execution. If its last operation read an old value,
  // another execution has the same beginning and continues: there it reads the newest value.
  idle_ = options_.reduce && me.retries == 0 && me.op.kind == Kind::load &&
          !me.looked_at.empty() && is_old(me, me.looked_at.back());
  stop();
}

// Accesses that may race happen one after the other, in every order, and only fences order
// them, as for relaxed operations; but they read the newest value.
bool Explorer::race_as_meant(std::uintptr_t at) {
  for (const Racing &racing : may_race)
    if (at >= racing.at && at < racing.at + racing.bytes) {
      perform({Kind::add, racing.word, 8, __ATOMIC_RELAXED, __ATOMIC_RELAXED, 0, 0, 0});
      return true;
    }
  return false;
}

void Explorer::access(std::uintptr_t at, std::size_t bytes, bool writes) {
  if (!running() || bytes == 0 || !arena_.owns(at))
    return;
  const int me = current_;
  if (race_as_meant(at))
    return;
  const Clock &clock = threads_[std::size_t(me)].now.clock;
  for (std::size_t c = arena_.offset(at) / 4; c <= (arena_.offset(at) + bytes - 1) / 4; ++c) {
    Cell &cell = cells_[c];
    if (cell.execution != execution_)
      cell = {execution_, no_thread, 0, {}};
    bool races = cell.writer != no_thread && cell.writer != me &&
                 !knows(clock, cell.writer, cell.written);
    if (writes)
      for (int t = 0; t < max_threads; ++t)
        races = races || (t != me && !knows(clock, t, cell.read[std::size_t(t)]));
    if (races)
      fail("thread " + std::to_string(me) + (writes ? " writes " : " reads ") + name_of(at) +
           ", and another thread uses it at the same time");
    if (writes) {
      cell.writer = me;
      cell.written = clock[std::size_t(me)];
      cell.read = {};
    } else {
      cell.read[std::size_t(me)] = clock[std::size_t(me)];
    }
  }
}

void Explorer::fail(const std::string &what) {
  const Outside outside(*this);
  if (report.error.empty()) {
    report.error = what;
    for (const Event &event : events_)
      report.trace.push_back(describe(event));
  }
  if (running())
    stop(); // it does not continue
}

std::string Explorer::name_of(std::uintptr_t at) const {
  auto found = names.upper_bound(at);
  char text[64];
  if (found == names.begin()) {
    std::snprintf(text, sizeof text, "+%zu", arena_.offset(at));
    return text;
  }
  --found;
  std::snprintf(text, sizeof text, "+%zu", std::size_t(at - found->first));
  return found->second + (at == found->first ? "" : text);
}

std::string Explorer::describe(const Event &event) const {
  std::string text = std::to_string(event.thread) + ": " + kind_names[int(event.op.kind)];
  if (event.location >= 0) {
    const Location &place = locations_[std::size_t(event.location)];
    text += " " + name_of(place.at) + " = " +
            std::to_string(place.stores[std::size_t(event.store)].value);
    if (!writes(event.op.kind)) {
      const int store = place.stores[std::size_t(event.store)].event;
      text += store < 0 ? " as it was" : " of " + std::to_string(events_[std::size_t(store)].thread);
    }
  }
  return text + " " + order_names[event.op.order];
}

} // namespace

Report explore(const Options &options, const std::function<Scenario()> &make) {
  // Never deleted: objects of the last execution are in memory of the model.
  explorer = new Explorer(options, make);
  return explorer->explore();
}

void check(bool holds, const char *what) {
  if (!holds)
    explorer->fail(what);
}

void outcome(const std::string &what) {
  const Explorer::Outside outside(*explorer);
  explorer->report.outcomes.insert(std::string(what.data(), what.size()));
}

bool planted(const char *fault) { return explorer != nullptr && explorer->planted(fault); }

void await() { explorer->await(); }

void name(const volatile void *at, const std::string &what) {
  const Explorer::Outside outside(*explorer);
  explorer->names[std::uintptr_t(at)] = std::string(what.data(), what.size());
}

void may_race(const void *at, std::size_t bytes) {
  const Explorer::Outside outside(*explorer);
  const auto word = std::uintptr_t(explorer->memory(sizeof(std::uint64_t)));
  explorer->may_race.push_back({std::uintptr_t(at), bytes, word});
  explorer->names[word] = "memory that may race";
}

Answer perform(Op op) {
  return explorer == nullptr ? direct(op) : explorer->perform(op);
}

void access(std::uintptr_t at, std::size_t bytes, bool writes) {
  if (explorer != nullptr)
    explorer->access(at, bytes, writes);
}

void *allocate(std::size_t bytes, std::size_t alignment) {
  return explorer == nullptr ? nullptr : explorer->allocate(bytes, alignment);
}

bool owns(const void *at) { return explorer != nullptr && explorer->owns(at); }

} // namespace model
