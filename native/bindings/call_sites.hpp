// Where in Python a call was made, the frames above it as a number, and where all threads
// are. By threads that Python knows, with the interpreter lock if there is one.
//
// Call sites only if enabled. Their frames are stored as code object and offset, which is
// cheap; names and lines are looked up when they are read.

#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace unisono {

using PythonFrame = std::tuple<std::string, std::string, int>; // function, file, line

// Enables call sites; frames of files whose name begins with `ours` are left out.
void enable_call_sites(const std::string &ours);
// The number of the place from which Python called; 0 if not enabled.
std::uint32_t call_site_here();
// Its frames, the innermost first.
std::vector<PythonFrame> call_site_frames(std::uint32_t site);

// The frames of every thread by its number in Python, the innermost first, at most so many.
// They are read while no thread can run: a program in Python that follows the frames of
// another thread lets that run meanwhile, and then reads memory of frames that are gone.
std::vector<std::pair<unsigned long, std::vector<PythonFrame>>>
thread_stacks(std::size_t deepest);

} // namespace unisono
