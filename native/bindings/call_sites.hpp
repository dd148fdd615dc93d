// Where in Python a call was made: the frames above it, as a number.
//
// Only if enabled, and under the interpreter lock. Frames are stored as code object and
// offset, which is cheap; names and lines are looked up when they are read.

#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace unisono {

// Enables call sites; frames of files whose name begins with `ours` are left out.
void enable_call_sites(const std::string &ours);
// The number of the place from which Python called; 0 if not enabled.
std::uint32_t call_site_here();
// Its frames, the innermost first: function, file, line.
std::vector<std::tuple<std::string, std::string, int>> call_site_frames(std::uint32_t site);

} // namespace unisono
