// What the executor is given: one rank's program, and a plan that makes it concrete.
//
// A program is src/unisono/schedule/lower.py's, as flat tables. A plan adds what the bytes
// need: where chunks lie in the buffers, how large they are and how they are cut into
// pieces, and how elements are reduced. Both are made in Python and never changed.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/codec.hpp"
#include "kernels/reduce.hpp"
#include "memory/layout.hpp"

namespace unisono {

struct Program {
  enum Home : std::int32_t { input = 0, output = 1, window = 2, stream = 3, code = 4 };
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
    std::int32_t code, back; // where its code goes, or -1; whether it then holds what that says
  };
  struct Message {
    std::int32_t to, chunk, home, index, after;
  };
  // The messages to one rank, in their order.
  struct Course {
    std::size_t to;
    std::vector<Message> messages;
  };
  std::vector<Action> actions;
  std::vector<Source> sources;
  std::vector<Wait> waits, exits;
  std::vector<std::int32_t> lead, readers;
  std::vector<std::int32_t> deliveries; // ranks that are brought the result
  std::int32_t tail = 0; // actions at the end that nobody waits for
  std::vector<Course> courses;         // what leaves for other hosts
  std::vector<std::int32_t> course_to; // by rank, which of them, or -1; or empty
  std::vector<std::int32_t> incoming; // how many messages come from each rank, or empty

  // Sorts the messages by where they go, and counts those that come.
  void cross(const std::vector<Message> &messages) {
    if (!messages.empty())
      course_to.assign(lead.size(), -1);
    for (const Message &message : messages) {
      std::int32_t &course = course_to[std::size_t(message.to)];
      if (course < 0) {
        course = std::int32_t(courses.size());
        courses.push_back({std::size_t(message.to), {}});
      }
      courses[std::size_t(course)].messages.push_back(message);
    }
    for (const Source &source : sources)
      if (source.home == stream) {
        incoming.resize(lead.size());
        ++incoming[std::size_t(source.rank)];
      }
  }
};

struct Plan {
  // By which buffers are lent: bit 0 the inputs, bit 1 the outputs, of all ranks.
  std::array<std::shared_ptr<const Program>, 4> programs;
  std::vector<std::int64_t> input_at, output_at, size; // of each chunk, in elements
  // By what is lent, as the programs: elements of a chunk at a time, and how many times.
  std::array<std::int64_t, 4> piece{}, pieces{1, 1, 1, 1};
  std::size_t itemsize = 1;
  std::size_t input_bytes = 0, output_bytes = 0;
  std::uint64_t sent_bytes = 0; // by this rank, to others, as the schedule has it
  Kernel kernel = nullptr;
  std::uint32_t divisor = 1;
  bool in_header = false; // what others read fits into the header itself
  bool streams = false;   // the output is too large to find in the cache afterwards
  bool may_lend = false;  // worth reading buffers in place where they are shared
  bool may_reach = false; // worth reaching for those that are not
  // Across hosts what is lent does not depend on what turns up, so that all cut alike:
  // everything or nothing, and there is but this one program. -1: within one host.
  int lent_always = -1;
  std::uint64_t fingerprint = 0;
  Note note{};
  // What travels instead of values, if a codec is given: collective_codes.cpp.
  struct Coding {
    const Codec *codec = nullptr;
    DType dtype = DType::float32;
    std::size_t block = 1;             // elements that share a scale
    std::size_t at = 0, stride = 0;    // bytes to the first code in a window, and to the next
    std::size_t frame = 0;             // elements of a frame between hosts
    std::size_t slice = 0;             // elements that stay in the cache
    bool by_chance = false;            // how codes are rounded
    std::size_t room = 0; // where nobody here reads them: bytes for codes, not in the window

    std::size_t bytes(std::size_t count) const { return codec->bytes(block, count); }
  } coding;
};

} // namespace unisono
