// Threads for what follows when work has ended, and Python objects that may end there.

#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include <torch/csrc/utils/pybind.h>

namespace unisono {

// A new thread whenever none is idle: a job may wait for another that comes after it.
class CallbackPool {
public:
  using Job = std::function<void()>;

  // The process's own. It is never destroyed, as its threads may outlive `main`.
  static CallbackPool &get() { return *slot(); }

  void run(Job job) {
    std::lock_guard lock(mutex_);
    if (ended_)
      return leak(std::move(job));
    jobs_.push_back(std::move(job));
    if (idle_ < jobs_.size())
      start();
    changed_.notify_one();
  }

  // The interpreter is about to end: begin nothing new, and give what runs a moment.
  void end() {
    std::unique_lock lock(mutex_);
    ended_ = true;
    for (; !jobs_.empty(); jobs_.pop_front())
      leak(std::move(jobs_.front()));
    changed_.wait_for(lock, std::chrono::seconds(1), [this] { return running_ == 0; });
  }

  bool ended() const { return ended_; }

private:
  static CallbackPool *&slot() {
    static CallbackPool *pool = [] {
      // A fork has none of the threads, and perhaps a lock that nobody will open.
      ::pthread_atfork(nullptr, nullptr, [] { slot() = new CallbackPool; });
      return new CallbackPool;
    }();
    return pool;
  }

  // What a job holds is Python's, which can no longer take it back.
  static void leak(Job job) { new Job(std::move(job)); }

  void start() {
    sigset_t all, before; // signals are for the threads of Python
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread([this] { work(); }).detach();
    } catch (const std::system_error &) { // one of those there are gets to it
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      const bool found = changed_.wait_for(lock, std::chrono::seconds(10),
                                           [this] { return !jobs_.empty(); });
      --idle_;
      if (!found)
        return;
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      ++running_;
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
      if (--running_ == 0 && ended_)
        changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::size_t idle_ = 0, running_ = 0;
  std::atomic<bool> ended_ = false;
};

// A Python object that may be released on any thread, with or without the GIL.
class PyReference {
public:
  PyReference() = default;
  explicit PyReference(py::object object) : object_(object.release().ptr()) {}
  PyReference(PyReference &&other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyReference &operator=(PyReference &&other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~PyReference() {
    if (object_ == nullptr)
      return;
    if (PyGILState_Check()) {
      Py_DECREF(object_);
    } else if (!CallbackPool::get().ended()) {
      py::gil_scoped_acquire locked;
      Py_DECREF(object_);
    }
  }
  explicit operator bool() const { return object_ != nullptr; }
  py::handle operator*() const { return object_; }

private:
  PyObject *object_ = nullptr;
};

} // namespace unisono
