// What the executor is given: one rank's program, and a plan that makes it concrete.
//
// A program is src/unisono/schedule/lower.py's, as flat tables. A plan adds what the bytes
// need: where chunks lie in the buffers, how large they are and how they are cut into
// pieces, and how elements are reduced. Both are made in Python and never changed.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "reduce.hpp"
#include "shared.hpp"

namespace unisono {

struct Program {
  enum Home : std::int32_t { input = 0, output = 1, window = 2 };
  struct Source {
    std::int32_t home, rank, index;
  };
  struct Wait {
    std::int32_t rank, count;
  };
  struct Action {
    std::int32_t chunk, window, output, completes; // -1: not written there
    std::int32_t first_source, end_source, first_wait, end_wait;
    std::int32_t first_delivery, end_delivery;
  };
  std::vector<Action> actions;
  std::vector<Source> sources;
  std::vector<Wait> waits, exits;
  std::vector<std::int32_t> lead, readers;
  std::vector<std::int32_t> deliveries; // ranks that are brought the result
  std::int32_t tail = 0; // actions at the end that nobody waits for
};

struct Plan {
  // By which buffers are lent: bit 0 the inputs, bit 1 the outputs, of all ranks.
  std::array<std::shared_ptr<const Program>, 4> programs;
  std::vector<std::int64_t> input_at, output_at, size; // of each chunk, in elements
  // By what is lent, as the programs: elements of a chunk at a time, and how many times.
  std::array<std::int64_t, 4> piece{}, pieces{1, 1, 1, 1};
  std::size_t itemsize = 1;
  std::size_t input_bytes = 0, output_bytes = 0;
  Kernel kernel = nullptr;
  std::uint32_t divisor = 1;
  bool in_header = false; // what others read fits into the header itself
  bool streams = false;   // the output is too large to find in the cache afterwards
  bool may_lend = false;  // worth reading buffers in place where they are shared
  bool may_reach = false; // worth reaching for those that are not
  std::uint64_t fingerprint = 0;
  Note note{};
};

} // namespace unisono
