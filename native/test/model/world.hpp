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

// What lower made of a collective, for all ranks, as tests/native/protocol_model.py wrote it down.
struct Lowered {
  std::vector<std::int64_t> input_at, output_at; // of chunks of one element
  std::vector<std::vector<std::shared_ptr<unisono::Program>>> programs; // by lent, by rank
};
void read_programs(const char *path);
const Lowered &lowered(const std::string &name, int n);

// How a plan cuts its chunks: how many pieces of one element each has.
struct Cut {
  int pieces = 1;
  bool in_header = false;
  bool exposes = false; // programs for exposed buffers, if not
};
std::shared_ptr<const unisono::Plan> make_plan(const std::string &name, int n, int rank,
                                               Cut cut, std::uint64_t fingerprint = 1);

// Shared by the threads of an execution, and made anew for each.
struct World {
  explicit World(int n);
  unisono::Comm &operator[](int rank) { return *comms[std::size_t(rank)]; }
  int n;
  std::shared_ptr<unisono::PeerTable> table;
  std::vector<std::unique_ptr<unisono::Comm>> comms;
};

// A call as Comm::drive and Comm::settle conduct it, but with the model's waiting; true if it
// succeeded. Who waits looks whether somebody has given up, or trusts that nobody does; one
// that is impatient gives up itself when it first has to wait.
enum class Waits { trusting, looking, impatient };
bool call(unisono::Comm &comm, std::shared_ptr<const unisono::Plan> plan,
          const Element *input, Element *output, Waits how = Waits::trusting,
          unisono::Failure *failure = nullptr);

} // namespace model
