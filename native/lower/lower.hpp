// From a schedule to the program of one rank: what src/unisono/schedule/lower.py does, for
// values that are sent as they are. The programs are equal, and the tests hold them so.
// All ranks' actions are numbered, because ranks wait for each other's; but the tables of
// one rank alone are made.

#pragma once

#include <cstdint>
#include <optional>

#include "engine/program.hpp"
#include "lower/versions.hpp"

namespace unisono::lowering {

// Which buffers others can read.
struct Shared {
  bool input = false, output = false;
};

// One rank's program; and of all ranks, the places that a window must have, the steps that
// follow each other, the actions of the longest program, and whether every sum is made in
// one pass over all ranks' inputs.
struct Lowered {
  Program program;
  std::int32_t places = 0, depth = 0;
  std::size_t longest = 0;
  bool canonical = true;
};

// Nothing if the schedule adds chunks of different names, which cannot be run.
std::optional<Lowered> lower(const Input &input, Shared shared, std::int32_t rank);

} // namespace unisono::lowering
