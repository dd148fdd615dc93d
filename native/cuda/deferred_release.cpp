#include "cuda/deferred_release.hpp"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>

#include "cuda/api.hpp"
#include "support/fork.hpp"

namespace unisono::cuda {

namespace {

constexpr auto period = std::chrono::milliseconds(20);

struct Pending {
  std::function<void()> release;
  std::function<bool()> is_ready;
};

class Releaser {
public:
  void add(Pending pending) {
    {
      const std::lock_guard lock(mutex_);
      pending_.push_back(std::move(pending));
      if (!started_) {
        started_ = true;
        thread_.start([this] { run(); });
      }
    }
    changed_.notify_one();
  }

private:
  // Never ends: it holds nothing that must be released before the process ends.
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !pending_.empty(); });
      std::list<Pending> now;
      now.swap(pending_);
      lock.unlock();
      now.remove_if([](Pending &p) {
        try {
          if (p.is_ready && !p.is_ready())
            return false;
          p.release();
        } catch (const std::exception &) {
          // The driver fails, and has nothing left to release.
        }
        return true;
      });
      lock.lock();
      const bool waits = !now.empty();
      pending_.splice(pending_.end(), now);
      if (waits)
        changed_.wait_for(lock, period);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Pending> pending_;
  bool started_ = false;
  Worker thread_;
};

} // namespace

void release_later(std::function<void()> release, std::function<bool()> is_ready) {
  if (is_used_before()) // what it would release is the parent's, and so is the thread
    return;
  static auto &releaser = *new Releaser; // never destroyed: its thread never ends
  releaser.add({std::move(release), std::move(is_ready)});
}

} // namespace unisono::cuda
