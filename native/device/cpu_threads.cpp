#include "device/cpu_threads.hpp"

#include <system_error>

namespace unisono::device {

CpuThreads::~CpuThreads() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  begins_.notify_all();
  for (Worker &worker : workers_)
    worker.join();
}

void CpuThreads::run(int count, const std::function<void(int)> &body) {
  std::unique_lock lock(mutex_);
  while (int(workers_.size()) < count) {
    Worker &added = workers_.emplace_back();
    try {
      added.start("unisono-blocks", [this, index = int(workers_.size()) - 1, round = round_] {
        loop(index, round);
      });
    } catch (const std::system_error &) {
      workers_.pop_back();
      throw;
    }
  }
  body_ = &body;
  count_ = running_ = count;
  ++round_;
  begins_.notify_all();
  ends_.wait(lock, [this] { return running_ == 0; });
}

void CpuThreads::loop(int index, std::uint64_t round) {
  std::unique_lock lock(mutex_);
  for (;;) {
    begins_.wait(lock, [&] { return closing_ || round_ != round; });
    if (closing_)
      return;
    round = round_;
    if (index >= count_)
      continue;
    lock.unlock();
    (*body_)(index);
    lock.lock();
    if (--running_ == 0)
      ends_.notify_one();
  }
}

} // namespace unisono::device
