#include "bindings/call_sites.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <unordered_map>

#include <nanobind/nanobind.h>

namespace nb = nanobind;

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

// Never destroyed: it holds objects of an interpreter that may have ended by then.
struct Sites {
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
  auto &known = sites().is_ours;
  const auto found = known.find(code);
  if (found != known.end())
    return found->second;
  const char *file = PyUnicode_AsUTF8(code->co_filename);
  if (file == nullptr)
    PyErr_Clear();
  const bool ours = file == nullptr || std::string(file).starts_with(sites().ours);
  Py_INCREF(reinterpret_cast<PyObject *>(code)); // so that its address is not reused
  return known[code] = ours;
}

// The frames of user code above this call.
Stack look() {
  Stack stack;
  std::size_t kept = 0;
  PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
  for (std::size_t i = 0; frame != nullptr && kept < depth && i < deepest; ++i) {
    PyCodeObject *code = PyFrame_GetCode(frame);
    if (kept > 0 || !is_ours(code)) {
      (void)is_ours(code); // keeps a reference
      stack.frames[kept++] = {code, PyFrame_GetLasti(frame)};
    }
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
  sites().ours = ours;
  looking.store(true, std::memory_order_relaxed);
}

std::uint32_t call_site_here() {
  if (!looking.load(std::memory_order_relaxed))
    return 0;
  Sites &all = sites();
  const Stack stack = look();
  const auto [found, added] =
      all.numbers.try_emplace(stack, std::uint32_t(all.stacks.size() + 1));
  if (added)
    all.stacks.push_back(stack);
  return found->second;
}

std::vector<PythonFrame> call_site_frames(std::uint32_t site) {
  std::vector<PythonFrame> frames;
  if (site == 0 || site > sites().stacks.size())
    return frames;
  for (const Frame &frame : sites().stacks[site - 1].frames)
    if (frame.code != nullptr)
      frames.emplace_back(text(frame.code->co_qualname), text(frame.code->co_filename),
                        PyCode_Addr2Line(frame.code, frame.at));
  return frames;
}

// Nothing here runs code of Python until all frames are known: so the interpreter lock is
// kept. The collector of garbage would, where an object is made.
std::vector<std::pair<unsigned long, std::vector<PythonFrame>>>
thread_stacks(std::size_t deepest) {
  struct NoCollection {
    int before = PyGC_Disable();
    ~NoCollection() {
      if (before)
        PyGC_Enable();
    }
  };
  std::vector<nb::object> held; // released after collection is allowed again
  std::vector<std::pair<unsigned long, std::vector<std::pair<nb::object, int>>>> found;
  {
    const NoCollection none;
    const nb::dict frames =
        nb::steal<nb::dict>(PyObject_CallNoArgs(PySys_GetObject("_current_frames")));
    if (!frames.is_valid())
      throw nb::python_error();
    held.push_back(frames);
    for (const auto &[ident, innermost] : frames) {
      auto &stack = found.emplace_back(PyLong_AsUnsignedLong(ident.ptr()),
                                       std::vector<std::pair<nb::object, int>>{}).second;
      nb::object at = nb::borrow(innermost);
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
