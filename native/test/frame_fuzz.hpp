// Damaged frames by the million, to show that none is believed.

#pragma once

#include <array>
#include <cstdint>

#include "net/frame.hpp"

namespace unisono {

struct FuzzCounts {
  std::uint64_t streams = 0;   // that were made and damaged
  std::uint64_t undamaged = 0; // of them, where the damage changed nothing
  std::uint64_t frames = 0;    // before the damage, and believed as they must be
  std::uint64_t wrong = 0;     // believed or refused against what must be; always 0
  std::uint64_t cut_off = 0;   // streams that end inside a frame, or after fewer of them
  std::array<std::uint64_t, num_flaws> flaws{}; // streams by what was found
};

// Makes `count` streams of a few frames, damages each in one of many ways, and reads them
// in random cuts. The same seed does the same.
FuzzCounts fuzz_frames(std::uint64_t seed, std::uint64_t count);

} // namespace unisono
