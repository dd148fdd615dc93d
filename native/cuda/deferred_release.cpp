#include "cuda/deferred_release.hpp"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>

#include "cuda/api.hpp"
#include "cuda/launch_gate.hpp"
#include "support/fork.hpp"

namespace unisono::cuda {

namespace {

constexpr auto release_period = std::chrono::milliseconds(5);
constexpr auto longest_release = std::chrono::seconds(1);

struct Pending {
  std::function<void()> step;
  std::function<bool()> is_ready;
  bool waits_for_kernels; // to be done while no collective is in flight
};

void perform(const Pending &pending) {
  try {
    pending.step();
  } catch (const std::exception &) {
    // The driver fails, and has nothing left to release.
  }
}

class Releaser {
public:
  void add(Pending pending) {
    {
      const std::lock_guard lock(mutex_);
      pending_.push_back(std::move(pending));
      if (!started_) {
        started_ = true;
        thread_.start("unisono-free", [this] { run(); });
      }
    }
    changed_.notify_all();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, longest_release, [this] { return pending_.empty() && !busy_; });
  }

private:
  // Never ends: it holds nothing that must be released before the process ends.
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !pending_.empty(); });
      std::list<Pending> now;
      now.swap(pending_);
      busy_ = true;
      lock.unlock();
      perform_ready(now);
      lock.lock();
      busy_ = false;
      const bool waits = !now.empty();
      pending_.splice(pending_.end(), now);
      changed_.notify_all();
      if (waits)
        changed_.wait_for(lock, release_period);
    }
  }

  // Takes what it has done out of the list.
  static void perform_ready(std::list<Pending> &list) {
    std::list<Pending> frees;
    for (auto i = list.begin(); i != list.end();) {
      const auto next = std::next(i);
      if (!i->is_ready || i->is_ready()) {
        if (i->waits_for_kernels) {
          frees.splice(frees.end(), list, i);
        } else {
          perform(*i);
          list.erase(i);
        }
      }
      i = next;
    }
    if (frees.empty())
      return;
    const bool done = LaunchGate::of_process().run_if_idle([&] {
      for (const Pending &p : frees)
        perform(p);
    });
    if (!done)
      list.splice(list.end(), frees);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Pending> pending_;
  bool started_ = false, busy_ = false;
  Worker thread_;
};

// Not in a forked child: what it would release is the parent's, and so is the thread.
Releaser &releaser() {
  static auto &made = *new Releaser; // never destroyed: its thread never ends
  return made;
}

} // namespace

void release_later(std::function<void()> release, std::function<bool()> is_ready) {
  if (!is_used_before())
    releaser().add({std::move(release), std::move(is_ready), true});
}

void run_later(std::function<void()> step, std::function<bool()> is_ready) {
  if (!is_used_before())
    releaser().add({std::move(step), std::move(is_ready), false});
}

void await_releases() {
  if (!is_used_before())
    releaser().wait();
}

} // namespace unisono::cuda
