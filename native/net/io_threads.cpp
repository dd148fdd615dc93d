#include "net/io_threads.hpp"

#include <utility>

#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "support/clock.hpp"
#include "support/fail.hpp"
#include "support/failpoint.hpp"
#include "support/futex.hpp"

namespace unisono {

namespace {

// The next message of a call often comes soon after the last.
constexpr std::int64_t longest_spin = 50'000;
// Tries of blocked jobs before the thread polls: a short wait is cheaper without.
constexpr unsigned most_tries = 20;

int made_event() {
  const int made = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (made < 0)
    fail("a descriptor that wakes a thread");
  return made;
}

void signal(int event) {
  const std::uint64_t one = 1;
  (void)!::write(event, &one, sizeof one);
}

void drain(int event) {
  std::uint64_t count;
  (void)!::read(event, &count, sizeof count);
}

} // namespace

IoThreads::IoThreads(std::size_t count, std::size_t least_bytes, std::size_t adders)
    : least_bytes_(least_bytes), adders_(adders), end_fd_(made_event()) {
  for (std::size_t i = 0; i < count; ++i)
    workers_.push_back(std::make_unique<Worker>(*this));
}

IoThreads::~IoThreads() {
  for (auto &worker : workers_) {
    const std::lock_guard lock(worker->mutex);
    worker->stop = true;
    worker->wake();
  }
  workers_.clear(); // when their threads have ended
  ::close(end_fd_);
}

void IoThreads::post(IoJob &job, std::size_t thread, std::atomic<std::uint32_t> &asleep) {
  Worker &worker = *workers_[thread];
  const std::lock_guard lock(worker.mutex);
  if (!worker.started)
    worker.thread.start("unisono-io", [&worker] { worker.run(); });
  worker.started = true;
  worker.arriving.push_back(&job);
  job.thread_ = thread;
  job.asleep_ = &asleep;
  job.recalled_.store(false, std::memory_order_relaxed);
  job.posted_.store(true, std::memory_order_relaxed);
  worker.wake();
}

void IoThreads::recall(IoJob &job) {
  if (origin_.forked() || !job.posted()) // a forked child has none of the threads
    return;
  job.recalled_.store(true, std::memory_order_relaxed);
  {
    Worker &worker = *workers_[job.thread_];
    const std::lock_guard lock(worker.mutex);
    worker.wake();
  }
  while (job.posted())
    ::sched_yield();
}

void IoThreads::pass() {
  if (origin_.forked())
    return;
  for (auto &worker : workers_)
    const std::lock_guard lock(worker->mutex);
}

pollfd IoThreads::await_end() {
  drain(end_fd_);
  polled_.store(true, std::memory_order_seq_cst);
  return {end_fd_, POLLIN, 0};
}

IoThreads::Worker::Worker(IoThreads &pool) : of(pool), wake_fd(made_event()) {}

IoThreads::Worker::~Worker() {
  thread.join();
  ::close(wake_fd);
}

// Under the mutex.
void IoThreads::Worker::wake() {
  news.fetch_add(1, std::memory_order_release);
  if (!std::exchange(asleep, false))
    return;
  signal(wake_fd);
}

// Under the mutex, which tells `pass` when the futex is no longer used. The job is its
// owner's again, and may be gone when this returns.
void IoThreads::Worker::drop(std::size_t at) {
  IoJob *job = jobs[at];
  std::atomic<std::uint32_t> &owner = *job->asleep_;
  jobs.erase(jobs.begin() + std::ptrdiff_t(at));
  job->posted_.store(false, std::memory_order_release);
  // As in Comm::wake_waiters: a sleep that begins just now is short.
  if (owner.exchange(0, std::memory_order_seq_cst) != 0)
    futex_wake(owner);
  if (of.polled_.exchange(false, std::memory_order_seq_cst))
    signal(of.end_fd_);
}

void IoThreads::Worker::run() {
  std::uint32_t seen = ~news.load(std::memory_order_relaxed);
  unsigned tries = 0;
  std::int64_t idle_since = 0;
  while (true) {
    if (const std::uint32_t now = news.load(std::memory_order_acquire); now != seen) {
      seen = now;
      const std::lock_guard lock(mutex);
      if (stop)
        return;
      jobs.insert(jobs.end(), arriving.begin(), arriving.end());
      arriving.clear();
      for (std::size_t i = jobs.size(); i-- > 0;)
        if (jobs[i]->recalled_.load(std::memory_order_relaxed))
          drop(i);
    }
    bool moved = false;
    for (std::size_t i = jobs.size(); i-- > 0;) {
      failpoint("io.step");
      const IoJob::Step step = jobs[i]->step();
      moved = moved || step != IoJob::Step::blocked;
      if (step == IoJob::Step::finished) {
        const std::lock_guard lock(mutex);
        drop(i);
      }
    }
    if (moved) {
      tries = 0;
      idle_since = 0;
      continue;
    }
    if (idle_since == 0)
      idle_since = now_ns();
    relax();
    const bool waits_on =
        jobs.empty() ? now_ns() - idle_since < longest_spin : ++tries < most_tries;
    if (!waits_on && sleep_until_ready(seen))
      tries = 0;
  }
}

// False if there is news, and the thread has not slept.
bool IoThreads::Worker::sleep_until_ready(std::uint32_t seen) {
  sockets.clear();
  sockets.push_back({wake_fd, POLLIN, 0});
  for (IoJob *job : jobs)
    job->poll_fds(sockets);
  {
    const std::lock_guard lock(mutex);
    if (news.load(std::memory_order_relaxed) != seen)
      return false;
    asleep = true;
  }
  ::ppoll(sockets.data(), sockets.size(), nullptr, nullptr);
  {
    const std::lock_guard lock(mutex);
    asleep = false;
  }
  drain(wake_fd);
  return true;
}

} // namespace unisono
