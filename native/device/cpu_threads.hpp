// Threads that are kept from launch to launch.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

#include "support/fork.hpp"

namespace unisono::device {

// Used by one thread at a time. All threads of a launch are there before any of them begins,
// because they wait for each other.
class CpuThreads {
public:
  CpuThreads() = default;
  CpuThreads(const CpuThreads &) = delete;
  CpuThreads &operator=(const CpuThreads &) = delete;
  ~CpuThreads();

  // Calls body(0) to body(count - 1), each in a thread of its own, and returns when all have
  // ended. std::system_error if there cannot be so many threads; then none was called.
  void run(int count, const std::function<void(int)> &body);

private:
  void loop(int index, std::uint64_t round);

  std::mutex mutex_; // of everything below
  std::condition_variable begins_, ends_;
  const std::function<void(int)> *body_ = nullptr;
  std::uint64_t round_ = 0;
  int count_ = 0, running_ = 0;
  bool closing_ = false;
  std::deque<Worker> workers_;
};

} // namespace unisono::device
