// Where in Python a call was made: the frames above it, as a number.
//
// Only while somebody asks for it, and with the interpreter lock. Frames are kept as code
// and offset, which is quick; names and lines are looked up when they are told.

#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace unisono {

// From now on, `here` looks; frames of files whose name begins so are left out.
void look_for_sites(const std::string &ours);
// The number of the place from which Python called; 0 if nobody asked.
std::uint32_t site_here();
// Its frames, the innermost first: function, file, line.
std::vector<std::tuple<std::string, std::string, int>> site_frames(std::uint32_t site);

} // namespace unisono
