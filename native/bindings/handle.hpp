// What Python holds of the engine: a communicator, and outstanding work on it; and how
// calls and failures are converted to plain values.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings/plan_cache.hpp"
#include "engine/comm.hpp"
#include "unisono/interop/torch/hooks.hpp"

namespace unisono {

// The threads of Python that make blocking collectives on a communicator, by their numbers
// there: those within one, and those whose call has failed, which is the last of their calls.
class CallingThreads {
public:
  void enter() {
    const std::lock_guard lock(mutex_);
    threads_.push_back(PyThread_get_thread_ident());
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    const auto mine = std::find(threads_.begin(), threads_.end(), PyThread_get_thread_ident());
    if (mine != threads_.end())
      threads_.erase(mine);
  }
  std::vector<unsigned long> all() const {
    const std::lock_guard lock(mutex_);
    return threads_;
  }

private:
  mutable std::mutex mutex_;
  std::vector<unsigned long> threads_;
};

// Asynchronous calls that other extension modules began, with the threads that began them.
// Python keeps those that it began itself.
class BegunCalls {
public:
  struct Begun {
    std::shared_ptr<Task> op;
    unsigned long thread;
  };

  // Forgets those that have ended.
  void add(const std::shared_ptr<Task> &op) {
    const std::lock_guard lock(mutex_);
    while (!calls_.empty() && !calls_.front().op->pending_now())
      calls_.pop_front();
    if (calls_.size() >= limit_) { // a message may be awaited for long
      std::erase_if(calls_, [](const Begun &call) { return !call.op->pending_now(); });
      limit_ = 2 * calls_.size() + fewest;
    }
    if (!succeeded(*op))
      calls_.push_back({op, PyThread_get_thread_ident()});
  }
  std::vector<Begun> unfinished() const {
    const std::lock_guard lock(mutex_);
    std::vector<Begun> found;
    std::copy_if(calls_.begin(), calls_.end(), std::back_inserter(found),
                 [](const Begun &call) { return !succeeded(*call.op); });
    return found;
  }

private:
  static bool succeeded(const Task &op) {
    return op.state.load(std::memory_order_acquire) == Task::succeeded;
  }

  static constexpr std::size_t fewest = 64;
  mutable std::mutex mutex_;
  std::deque<Begun> calls_;
  std::size_t limit_ = fewest;
};

struct Handle : Comm {
  using Comm::Comm;
  PlanCache plan_cache;
  std::atomic<std::int64_t> timeout = 0; // of its calls, in ns; 0: none
  CallingThreads calling_threads;
  BegunCalls begun_calls;
};

// What Python holds of a program and of a plan. Not these themselves: their last reference
// must not be Python's, since any thread may release it, such as the progress thread,
// without the interpreter lock.
struct ProgramHolder {
  std::shared_ptr<const Program> program;
};
struct PlanHolder {
  std::shared_ptr<const Plan> plan;
};

struct Work {
  std::shared_ptr<Comm> comm;
  std::shared_ptr<Task> op;
  std::vector<std::size_t> late; // the ranks waited for when a wait for it timed out

  // 0: pending, 1: done, 2: failed. Without `helps` the progress thread advances it, and
  // the caller sleeps.
  int wait(std::int64_t timeout, bool helps = true);

private:
  void note_block(std::int64_t begun);
  bool wait_unlocked(std::int64_t timeout, bool helps);
};

// For other extension modules, as `WorkHooks` has them.
int run_planned(PyObject *comm, PyObject *plan, const void *input, void *output,
                std::int64_t timeout);
PyObject *submit_planned(PyObject *comm, PyObject *plan, const void *input, void *output,
                         std::int64_t timeout);
PyObject *begin_message(PyObject *comm, const Message *message);

using FailureTuple = std::tuple<int, std::uint32_t, std::uint32_t, std::uint64_t>;

inline FailureTuple failure_tuple(Failure v) {
  return {int(v.kind), v.culprit, v.reporter, v.seq};
}

inline void set_note(Note &note, int collective, int dtype, int op, int root,
                     std::uint64_t count) {
  note.collective = std::uint8_t(collective);
  note.dtype = std::uint8_t(dtype);
  note.op = std::uint8_t(op);
  note.root = root;
  note.count = count;
}

// False if they do not fit.
inline bool set_texts(Note &note, const std::vector<std::string> &texts) {
  std::size_t at = 0;
  for (std::size_t i = 0; i < texts.size() && i < Note::num_texts; ++i) {
    const std::string &text = texts[i];
    if (text.size() > 0xff || text.size() > sizeof note.text - at)
      return false;
    std::memcpy(note.text + at, text.data(), text.size());
    note.lengths[i] = std::uint8_t(text.size());
    at += text.size();
  }
  return texts.size() <= Note::num_texts;
}

// One of its texts; the lengths may be wrong, in a torn note or one from another host.
inline nanobind::object text_of(const Note &note, Note::Text which) {
  std::size_t at = 0;
  for (std::size_t i = 0; i < which; ++i)
    at = std::min(at + note.lengths[i], sizeof note.text);
  const std::size_t length = std::min<std::size_t>(note.lengths[which], sizeof note.text - at);
  return nanobind::steal(
      PyUnicode_DecodeUTF8(note.text + at, Py_ssize_t(length), "replace"));
}

// A copy of a note that its rank may be writing. It is not inlined, so that ThreadSanitizer
// finds the name by which this race is known (test/tsan.supp).
[[gnu::noinline]] inline Note read_note(const Note &note) { return note; }

// As src/unisono/runtime/call/notes.py reads it.
inline nanobind::tuple note_tuple(const Note &shared) {
  const Note note = read_note(shared);
  return nanobind::make_tuple(note.seq, note.collective, note.dtype, note.op, note.root,
                              note.count, note.fingerprint, note.content,
                              text_of(note, Note::algorithm), text_of(note, Note::label),
                              text_of(note, Note::codec), text_of(note, Note::shape));
}

} // namespace unisono

// The calls of a communicator's class: bind_calls.cpp.
void bind_calls(nanobind::module_ &m, nanobind::class_<unisono::Handle> &comm);
