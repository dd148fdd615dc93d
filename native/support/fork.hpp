// Native objects in forked processes.
//
// A forked child has copies of the parent's objects but none of its threads. There a lock
// may be held for ever, a condition variable may have waiters that never wake, and a thread
// object refers to no thread. So a child never waits for anything of the parent, and leaves
// alone what it cannot destroy.

#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <pthread.h>

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

// A shared object that is destroyed only in the process that made it: in a child another
// thread may have been modifying it.
template <class T, class... Args> std::shared_ptr<T> make_fork_safe(Args &&...args) {
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [origin = Origin()](T *held) {
    if (!origin.forked())
      delete held;
  });
}

// A thread with all signals blocked. The destructor joins it; in a forked child there is
// nothing to join or to destroy.
class Worker {
public:
  Worker() = default;
  Worker(const Worker &) = delete;
  Worker &operator=(const Worker &) = delete;
  ~Worker() { join(); }
  // With a name of 15 characters at most, which `top -H` and debuggers show.
  template <class Run> void start(const char *name, Run run) {
    SignalsBlocked while_it_begins;
    thread_ = new std::thread([name, run = std::move(run)]() mutable {
      ::pthread_setname_np(::pthread_self(), name);
      run();
    });
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

// Called in a forked child, on its only thread, before fork() returns there. No fork
// happens while a thread holds `block_forks()`: it is held to change what `in_child` reads.
class ForkAware {
public:
  virtual void in_child() = 0;

protected:
  ~ForkAware() = default; // it has been unregistered by then
  void register_fork_handler();     // under the lock
  void unregister_fork_handler();    // under the lock
};

std::unique_lock<std::mutex> block_forks();

} // namespace unisono
