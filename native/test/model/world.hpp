// Ranks of the product, as threads of a scenario: real communicators in real shared memory.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/comm.hpp"
#include "test/model/scenarios.hpp"

namespace model {

using Element = std::uint64_t;

// The lowered programs of a collective, for all ranks, as tests/native/protocol_model.py writes them.
struct Lowered {
  std::vector<std::int64_t> input_at, output_at; // of chunks of one element
  std::vector<std::vector<std::shared_ptr<unisono::Program>>> programs; // by exposed buffers, by rank
};
void read_programs(const char *path);
const Lowered &lowered(const std::string &name, int n);

// The pieces of a plan: how many pieces of one element each chunk has.
struct Cut {
  int pieces = 1;
  bool in_header = false;
  bool exposes = false; // programs for exposed buffers, if not
};
std::shared_ptr<const unisono::Plan> make_plan(const std::string &name, int n, int rank,
                                               Cut cut, std::uint64_t fingerprint = 1);

// Shared by the threads of an execution; each execution makes a new one.
struct World {
  explicit World(int n);
  unisono::Comm &operator[](int rank) { return *comms[std::size_t(rank)]; }
  int n;
  std::shared_ptr<unisono::PeerTable> table;
  std::vector<std::unique_ptr<unisono::Comm>> comms;
};

// Runs a call as Comm::drive and Comm::settle do, but with the model's waits; true if it
// succeeded. A waiting rank may check whether another has aborted; an impatient rank aborts
// itself when it first has to wait.
enum class Waits { trusting, looking, impatient };
bool call(unisono::Comm &comm, std::shared_ptr<const unisono::Plan> plan,
          const Element *input, Element *output, Waits how = Waits::trusting,
          unisono::Failure *failure = nullptr);

} // namespace model
