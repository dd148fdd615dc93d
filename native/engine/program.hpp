// The input of the executor: one rank's program, and a plan that makes it concrete.
//
// A program comes from native/lower, or with a codec from src/unisono/schedule/lower.py as
// flat tables. A plan adds the offsets of chunks in the buffers, their sizes, how they are
// cut into pieces, and the reduction kernel. It is made in Python; both are immutable.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/program_rows.hpp"
#include "kernels/codec.hpp"
#include "kernels/reduce.hpp"
#include "memory/layout.hpp"

namespace unisono {

struct Program {
  using enum rows::Home;
  using Source = rows::Source;
  using Wait = rows::Wait;
  using Action = rows::Action;
  struct Message {
    std::int32_t to, chunk, home, index, after;
  };
  // The messages to one rank, in order.
  struct Outgoing {
    std::size_t to;
    std::vector<Message> messages;
  };
  std::vector<Action> actions;
  std::vector<Source> sources;
  std::vector<Wait> waits, exits;
  std::vector<std::int32_t> lead, readers;
  std::vector<std::int32_t> deliveries; // ranks that the result is written to
  std::vector<Outgoing> outgoing; // messages to other hosts
  std::vector<std::int32_t> outgoing_to; // by rank, index into `outgoing`, or -1; or empty
  std::vector<std::int32_t> incoming; // messages from each rank, or empty
  bool adds = false; // some action combines several sources

  // Groups the messages by destination, and counts the incoming ones; when all else is there.
  void add_messages(const std::vector<Message> &messages) {
    adds = std::any_of(actions.begin(), actions.end(), [](const Action &action) {
      return action.end_source - action.first_source > 1;
    });
    if (!messages.empty())
      outgoing_to.assign(lead.size(), -1);
    for (const Message &message : messages) {
      std::int32_t &index = outgoing_to[std::size_t(message.to)];
      if (index < 0) {
        index = std::int32_t(outgoing.size());
        outgoing.push_back({std::size_t(message.to), {}});
      }
      outgoing[std::size_t(index)].messages.push_back(message);
    }
    for (const Source &source : sources)
      if (source.home == stream) {
        incoming.resize(lead.size());
        ++incoming[std::size_t(source.rank)];
      }
  }
};

struct Plan {
  // By which buffers are exposed: bit 0 the inputs, bit 1 the outputs, of all ranks.
  std::array<std::shared_ptr<const Program>, 4> programs;
  std::vector<std::int64_t> input_at, output_at, size; // of each chunk, in elements
  // Likewise: elements per piece of a chunk, and the number of pieces.
  std::array<std::int64_t, 4> piece{}, pieces{1, 1, 1, 1};
  // Of a window, of the rank that needs most, where nothing is exposed; for devices.
  std::int32_t places = 0;
  std::size_t itemsize = 1;
  std::size_t input_bytes = 0, output_bytes = 0;
  std::uint64_t sent_bytes = 0; // by this rank to others, by the schedule
  Kernel kernel = nullptr;
  std::uint32_t divisor = 1;
  bool in_header = false; // what other ranks read fits into the header itself
  bool streams = false; // the output is too large to stay in the cache
  bool may_expose = false; // it pays to access shared buffers in place
  bool may_cross_memory = false; // and private ones through the kernel
  // Between hosts the exposed buffers are fixed, so that all ranks cut messages alike: all
  // or none, and there is only this program. -1: within one host.
  int always_exposed = -1;
  std::uint64_t fingerprint = 0;
  Note note{};
  // What is transferred instead of values, if there is a codec: collective_codes.cpp.
  struct Coding {
    const Codec *codec = nullptr;
    DType dtype = DType::float32;
    std::size_t block = 1;             // elements that share a scale
    // bytes to the first code in a window, and from one to the next
    std::size_t at = 0, stride = 0;
    std::size_t frame = 0;             // elements of a frame between hosts
    std::size_t slice = 0;             // elements that stay in the cache
    bool by_chance = false; // stochastic rounding
    std::size_t room = 0; // bytes for codes outside the window, if no local rank reads them

    std::size_t bytes(std::size_t count) const { return codec->bytes(block, count); }
  } coding;
};

} // namespace unisono
