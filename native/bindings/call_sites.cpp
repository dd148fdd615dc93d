#include "bindings/call_sites.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <unordered_map>

#include <Python.h>

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

std::vector<std::tuple<std::string, std::string, int>>
call_site_frames(std::uint32_t site) {
  std::vector<std::tuple<std::string, std::string, int>> frames;
  if (site == 0 || site > sites().stacks.size())
    return frames;
  for (const Frame &frame : sites().stacks[site - 1].frames)
    if (frame.code != nullptr)
      frames.emplace_back(text(frame.code->co_qualname), text(frame.code->co_filename),
                        PyCode_Addr2Line(frame.code, frame.at));
  return frames;
}

} // namespace unisono
