// What Python holds of the engine: a communicator, and outstanding work on it; and how
// calls and failures are converted to plain values.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings/plan_cache.hpp"
#include "engine/comm.hpp"

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

struct Handle : Comm {
  using Comm::Comm;
  PlanCache plan_cache;
  std::int64_t timeout = 0;
  CallingThreads calling_threads;
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

// A blocking call of a plan, for other extension modules; with the interpreter lock. What it
// returns is below, or -1 with an error set. After `planned_written` another rank may still
// write to the buffers: they must never be released.
enum : int { planned_general, planned_done, planned_failed, planned_written };
int run_planned(PyObject *comm, PyObject *plan, const void *input, void *output,
                std::int64_t timeout);

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
