// Threads that move bytes between hosts for the thread that advances a call.
//
// A job is a part of a transfer, such as the frames of one lane. Its owner posts it to one
// of the threads, which calls `step` until the job is finished, and sleeps while all of its
// jobs are blocked. The owner may recall a job; it then has it back as it was after the last
// step, and may go on with it.
//
// Who may touch a job: its owner while it is not posted, its thread while it is. The word
// `posted_` passes it on. The owner sets it before the job is visible to the thread, which
// finds the job under the thread's mutex. The thread clears it after its last step (release),
// and the owner reads it (acquire): so each sees all that the other has written. `recalled_`
// is written by the owner and read by the thread; nothing is ordered by it. What a job shows
// of its progress while it is posted is in atomics of its own.
//
// Threads start with the first job. One without jobs spins for `longest_spin` and then sleeps
// until the next job; one with blocked jobs sleeps until a descriptor of theirs is ready.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <poll.h>

#include "support/fork.hpp"

namespace unisono {

class IoJob {
public:
  enum class Step { moved, blocked, finished };

  virtual ~IoJob() = default;
  // Does a bounded amount of work, without waiting.
  virtual Step step() = 0;
  // What to poll for while it is blocked.
  virtual void poll_fds(std::vector<pollfd> &into) = 0;

  bool posted() const { return posted_.load(std::memory_order_acquire); }

private:
  friend class IoThreads;
  std::atomic<bool> posted_ = false, recalled_ = false;
  std::size_t thread_ = 0; // the owner's, like the next
  std::atomic<std::uint32_t> *asleep_ = nullptr;
};

class IoThreads {
public:
  IoThreads(std::size_t count, std::size_t least_bytes, std::size_t adders);
  ~IoThreads(); // no job is posted any more

  std::size_t count() const { return workers_.size(); }
  // How many of them, the first ones, have work in a call that adds up.
  std::size_t adders() const { return adders_; }

  // The smallest message that is worth it: a smaller one has come before they begin.
  std::size_t least_bytes() const { return least_bytes_; }

  // Hands a job to a thread. When it is finished, a thread that sleeps on the futex `asleep`
  // is woken.
  void post(IoJob &job, std::size_t thread, std::atomic<std::uint32_t> &asleep);
  // Takes a job back if it is posted; waits for the end of the current step.
  void recall(IoJob &job);
  // A descriptor that polls readable when a job ends after this call, for an owner that polls
  // sockets as well. Of several owners that poll at once one may miss it: their sleeps are
  // short.
  pollfd await_end();
  // Returns when no thread uses the futex of a job that is no longer posted.
  void pass();

private:
  struct Worker {
    explicit Worker(IoThreads &of);
    ~Worker();
    void run();
    bool sleep_until_ready(std::uint32_t seen);
    void wake();
    void drop(std::size_t at);

    IoThreads &of;
    std::mutex mutex;              // guards `arriving`, `asleep` and `stop`
    std::vector<IoJob *> arriving; // posted, and not seen by the thread
    bool asleep = false;           // the thread polls, and `wake_fd` ends that
    bool stop = false;
    bool started = false; // written by posting threads, under the mutex
    // Counts what the thread has to look at: jobs that arrive, recalls, the end. Written by
    // other threads, under the mutex; the thread reads it without.
    std::atomic<std::uint32_t> news = 0;
    int wake_fd;
    std::vector<IoJob *> jobs; // the thread's own, like the next
    std::vector<pollfd> sockets;
    unisono::Worker thread; // the last: it uses the others
  };

  Origin origin_;
  const std::size_t least_bytes_;
  const std::size_t adders_;
  // Owners set `polled_` before they poll `end_fd_`; a thread that ends a job clears it and
  // makes the descriptor readable. Nothing else is ordered by it.
  std::atomic<bool> polled_ = false;
  int end_fd_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

} // namespace unisono
