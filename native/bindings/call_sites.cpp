#include "bindings/call_sites.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include <pthread.h>

#include <nanobind/nanobind.h>

namespace nb = nanobind;

#ifdef Py_GIL_DISABLED
#if PY_VERSION_HEX < 0x030e0000
#error "free-threaded Python is supported from version 3.14 on"
#endif
// Exported by Python, and declared in its internal headers only.
extern "C" void _PyEval_StopTheWorld(PyInterpreterState *interpreter);
extern "C" void _PyEval_StartTheWorld(PyInterpreterState *interpreter);
#endif

namespace unisono {

namespace {

constexpr std::size_t depth = 8; // frames of user code that are kept
constexpr std::size_t deepest = 64; // frames that are inspected

struct Frame {
  PyCodeObject *code;
  int at;
  bool operator==(const Frame &) const = default;
};

struct Stack {
  std::array<Frame, depth> frames{};
  bool operator==(const Stack &) const = default;
};

struct Hash {
  std::size_t operator()(const Stack &stack) const {
    std::size_t h = 0;
    for (const Frame &frame : stack.frames)
      h = (h ^ reinterpret_cast<std::uintptr_t>(frame.code) ^ std::size_t(frame.at)) *
          0x9E3779B97F4A7C15u;
    return h ^ h >> 29;
  }
};

// Never destroyed: it holds objects of an interpreter that may have ended by then. A thread
// that has its lock makes nothing of Python, so it never waits there for another thread.
struct Sites {
  std::mutex mutex;
  std::string ours;
  std::unordered_map<PyCodeObject *, bool> is_ours; // keeps each code object that was seen
  std::unordered_map<Stack, std::uint32_t, Hash> numbers;
  std::vector<Stack> stacks;
};

std::atomic<bool> looking = false;

Sites &sites() {
  static auto *all = new Sites;
  return *all;
}

bool is_ours(PyCodeObject *code) {
  Sites &all = sites();
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.is_ours.find(code);
    if (found != all.is_ours.end())
      return found->second;
  }
  const char *file = PyUnicode_AsUTF8(code->co_filename);
  if (file == nullptr)
    PyErr_Clear();
  const std::lock_guard lock(all.mutex);
  const bool ours = file == nullptr || std::string(file).starts_with(all.ours);
  if (all.is_ours.try_emplace(code, ours).second)
    Py_INCREF(reinterpret_cast<PyObject *>(code)); // so that its address is not reused
  return ours;
}

// The frames of user code above this call.
Stack look() {
  Stack stack;
  std::size_t kept = 0;
  PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
  for (std::size_t i = 0; frame != nullptr && kept < depth && i < deepest; ++i) {
    PyCodeObject *code = PyFrame_GetCode(frame);
    const bool ours = is_ours(code); // keeps a reference
    if (kept > 0 || !ours)
      stack.frames[kept++] = {code, PyFrame_GetLasti(frame)};
    Py_DECREF(reinterpret_cast<PyObject *>(code));
    PyFrameObject *back = PyFrame_GetBack(frame);
    Py_DECREF(reinterpret_cast<PyObject *>(frame));
    frame = back;
  }
  Py_XDECREF(reinterpret_cast<PyObject *>(frame));
  return stack;
}

std::string text(PyObject *name) {
  const char *found = PyUnicode_AsUTF8(name);
  if (found == nullptr)
    PyErr_Clear();
  return found == nullptr ? "?" : found;
}

} // namespace

void enable_call_sites(const std::string &ours) {
  // No other thread has the lock when the process forks.
  [[maybe_unused]] static const int once =
      ::pthread_atfork([] { sites().mutex.lock(); }, [] { sites().mutex.unlock(); },
                       [] { sites().mutex.unlock(); });
  {
    const std::lock_guard lock(sites().mutex);
    sites().ours = ours;
  }
  looking.store(true, std::memory_order_relaxed);
}

std::uint32_t call_site_here() {
  if (!looking.load(std::memory_order_relaxed))
    return 0;
  Sites &all = sites();
  const Stack stack = look();
  const std::lock_guard lock(all.mutex);
  const auto [found, added] =
      all.numbers.try_emplace(stack, std::uint32_t(all.stacks.size() + 1));
  if (added)
    all.stacks.push_back(stack);
  return found->second;
}

std::vector<PythonFrame> call_site_frames(std::uint32_t site) {
  std::vector<PythonFrame> frames;
  Stack stack;
  {
    const std::lock_guard lock(sites().mutex);
    if (site == 0 || site > sites().stacks.size())
      return frames;
    stack = sites().stacks[site - 1];
  }
  for (const Frame &frame : stack.frames)
    if (frame.code != nullptr)
      frames.emplace_back(text(frame.code->co_qualname), text(frame.code->co_filename),
                        PyCode_Addr2Line(frame.code, frame.at));
  return frames;
}

namespace {

#ifdef Py_GIL_DISABLED

// While this lives no other thread runs code of Python.
class OthersStopped {
public:
  OthersStopped() { _PyEval_StopTheWorld(PyInterpreterState_Get()); }
  ~OthersStopped() { _PyEval_StartTheWorld(PyInterpreterState_Get()); }
  OthersStopped(const OthersStopped &) = delete;
  OthersStopped &operator=(const OthersStopped &) = delete;
};

std::vector<std::pair<unsigned long, nb::object>> innermost_frames() {
  std::vector<std::pair<unsigned long, nb::object>> found;
  for (PyThreadState *thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
       thread != nullptr; thread = PyThreadState_Next(thread))
    if (PyFrameObject *frame = PyThreadState_GetFrame(thread); frame != nullptr)
      found.emplace_back(thread->thread_id,
                         nb::steal(reinterpret_cast<PyObject *>(frame)));
  return found;
}

#else

// The interpreter lock is kept as long as nothing runs code of Python. The collector of
// garbage would, where an object is made.
class OthersStopped {
public:
  OthersStopped() : before_(PyGC_Disable()) {}
  ~OthersStopped() {
    if (before_)
      PyGC_Enable();
  }
  OthersStopped(const OthersStopped &) = delete;
  OthersStopped &operator=(const OthersStopped &) = delete;

private:
  int before_;
};

std::vector<std::pair<unsigned long, nb::object>> innermost_frames() {
  const nb::dict frames =
      nb::steal<nb::dict>(PyObject_CallNoArgs(PySys_GetObject("_current_frames")));
  if (!frames.is_valid())
    throw nb::python_error();
  std::vector<std::pair<unsigned long, nb::object>> found;
  for (const auto &[ident, innermost] : frames)
    found.emplace_back(PyLong_AsUnsignedLong(ident.ptr()), nb::borrow(innermost));
  return found;
}

#endif

} // namespace

std::vector<std::pair<unsigned long, std::vector<PythonFrame>>>
thread_stacks(std::size_t deepest) {
  std::vector<nb::object> held; // released after other threads may run again
  std::vector<std::pair<unsigned long, std::vector<std::pair<nb::object, int>>>> found;
  {
    const OthersStopped stopped;
    for (auto &[ident, innermost] : innermost_frames()) {
      auto &stack =
          found.emplace_back(ident, std::vector<std::pair<nb::object, int>>{}).second;
      nb::object at = std::move(innermost);
      while (at.is_valid() && stack.size() < deepest) {
        auto *const frame = reinterpret_cast<PyFrameObject *>(at.ptr());
        stack.emplace_back(nb::steal(reinterpret_cast<PyObject *>(PyFrame_GetCode(frame))),
                           PyFrame_GetLineNumber(frame));
        held.push_back(at);
        at = nb::steal(reinterpret_cast<PyObject *>(PyFrame_GetBack(frame)));
      }
      held.push_back(std::move(at));
    }
  }
  std::vector<std::pair<unsigned long, std::vector<PythonFrame>>> stacks;
  for (const auto &[ident, stack] : found) {
    auto &lines = stacks.emplace_back(ident, std::vector<PythonFrame>{}).second;
    for (const auto &[object, line] : stack) {
      const auto *code = reinterpret_cast<const PyCodeObject *>(object.ptr());
      lines.emplace_back(text(code->co_qualname), text(code->co_filename), line);
    }
  }
  return stacks;
}

} // namespace unisono
