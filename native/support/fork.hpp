// What a fork does to native objects.
//
// A forked child has copies of the parent's objects but none of its threads. There a lock
// may be held for ever, a condition variable may have waiters that never wake, and a thread
// object names a thread that does not exist. So in a child nothing of the parent is waited
// for, and what cannot be destroyed is left as it is.

#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "support/no_signals.hpp"

namespace unisono {

// Counts the forks that led to this process.
std::uint64_t fork_epoch();

// The process in which an object was made.
class Origin {
public:
  bool forked() const { return epoch_ != fork_epoch(); }

private:
  std::uint64_t epoch_ = fork_epoch();
};

// A shared object that is destroyed by the process that made it, and by no child of it: there
// another thread may have been in the middle of changing it.
template <class T, class... Args> std::shared_ptr<T> make_kept(Args &&...args) {
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [origin = Origin()](T *held) {
    if (!origin.forked())
      delete held;
  });
}

// A thread of ours, without signals. It is joined before this ends; in a child of the process
// that started it there is nothing to join or to destroy.
class Worker {
public:
  Worker() = default;
  Worker(const Worker &) = delete;
  Worker &operator=(const Worker &) = delete;
  ~Worker() { join(); }
  template <class Run> void start(Run run) {
    NoSignals while_it_begins;
    thread_ = new std::thread(std::move(run));
  }
  void join() {
    if (thread_ == nullptr || origin_.forked())
      return;
    thread_->join();
    delete std::exchange(thread_, nullptr);
  }

private:
  Origin origin_;
  std::thread *thread_ = nullptr;
};

// Told in a forked child, on its only thread, before fork() returns there. No fork happens
// while somebody holds `forks_held_off()`: who changes what `in_child` reads holds it.
class ForkAware {
public:
  virtual void in_child() = 0;

protected:
  ~ForkAware() = default; // by then it has been removed
  void watch_forks();     // under the lock
  void ignore_forks();    // under the lock
};

std::unique_lock<std::mutex> forks_held_off();

} // namespace unisono
