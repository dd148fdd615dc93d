#include "support/fork.hpp"

#include <atomic>
#include <vector>

#include <pthread.h>

namespace unisono {

namespace {

std::atomic<std::uint64_t> forks = 0;

// Never destroyed: a thread may outlive the statics of its process.
struct Registry {
  std::mutex mutex;
  std::vector<ForkAware *> all;
};

Registry &registry();

void before() { registry().mutex.lock(); }

void in_parent() { registry().mutex.unlock(); }

void in_child() {
  forks.fetch_add(1, std::memory_order_relaxed);
  for (ForkAware *one : registry().all)
    one->in_child();
  registry().all.clear(); // they have nothing to do in a child of this one
  registry().mutex.unlock();
}

Registry &registry() {
  static Registry *const made = [] {
    auto *const fresh = new Registry;
    ::pthread_atfork(before, in_parent, in_child);
    return fresh;
  }();
  return *made;
}

} // namespace

std::uint64_t fork_epoch() {
  (void)registry();
  return forks.load(std::memory_order_relaxed);
}

std::unique_lock<std::mutex> block_forks() {
  return std::unique_lock(registry().mutex);
}

void ForkAware::register_fork_handler() { registry().all.push_back(this); }

void ForkAware::unregister_fork_handler() { std::erase(registry().all, this); }

} // namespace unisono
