// The interpreter for devices on threads of the CPU, without a device communicator: all
// ranks of a world in one process, for tests of the kernel alone.

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <vector>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/handle.hpp"
#include "device/run_cpu.hpp"
#include "device/tables.hpp"
#include "test/bind_test_hooks.hpp"

namespace nb = nanobind;
using namespace unisono;
using namespace unisono::device;

namespace {

// What one rank runs: its plan, the addresses of its input and output, and the flags.
using RankCall = std::tuple<const PlanHolder *, std::uintptr_t, std::uintptr_t, unsigned>;
// Why, and the rank concerned; all 0 if it did not fail.
using Reported = std::tuple<unsigned, unsigned>;

class InterpretedWorld {
public:
  InterpretedWorld(const InterpretedWorld &) = delete;
  InterpretedWorld(std::size_t n, std::size_t half) : half_(half), ranks_(n), peers_(n) {
    for (std::size_t r = 0; r < n; ++r) {
      Rank &rank = ranks_[r];
      rank.words = std::make_unique<RankWords>();
      rank.windows.resize(2 * half + 16);
      rank.segments[0] = nullptr; // offsets are addresses
      rank.packets.resize(packet_area_bytes + 16);
      peers_[r] = {rank.words.get(), align(rank.windows.data()), rank.segments,
                   align(rank.packets.data())};
    }
  }

  // Lets ranks make a call each, at the same time; None is a rank that does not come.
  std::vector<Reported> run(const std::vector<nb::object> &given, int blocks, int threads,
                            std::uint64_t timeout_ns) {
    std::vector<Launch> launches(ranks_.size());
    std::vector<std::unique_ptr<PackedPlan>> packed(ranks_.size());
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (given.at(r).is_none())
        continue;
      const auto [plan, input, output, flags] = nb::cast<RankCall>(given[r]);
      packed[r] = std::make_unique<PackedPlan>(plan->plan);
      launches[r] = launch(r, *packed[r], input, output, flags, timeout_ns, blocks);
    }
    {
      nb::gil_scoped_release unlocked;
      std::vector<std::jthread> running;
      for (std::size_t r = 0; r < ranks_.size(); ++r)
        if (packed[r])
          running.emplace_back([&, r] {
            const Note &note = packed[r]->plan().note;
            const Op op = Op(note.op) == Op::count ? Op::sum : Op(note.op);
            run_on_cpu(launches[r], blocks, threads, DType(note.dtype), op);
          });
    }
    std::vector<Reported> reported;
    for (const Rank &rank : ranks_)
      reported.emplace_back(rank.failure.why, rank.failure.rank);
    return reported;
  }

  static bool fits_packets(const PlanHolder &plan, int blocks) {
    return PackedPlan(plan.plan).fits_packets(blocks);
  }

  // What other ranks read of a rank's packets.
  nb::bytes packets(std::size_t rank) const {
    return nb::bytes(align(ranks_.at(rank).packets.data()), std::size_t(packet_area_bytes));
  }

  // All blocks have made calls of so many generations.
  void set_generation(std::uint64_t generation) {
    for (Rank &rank : ranks_)
      for (BlockWords &block : rank.words->blocks)
        block.progress = generation << progress_action_bits;
  }

  // Only this block of a rank has: what it waits for does not come.
  void set_generation_of_block(std::size_t rank, std::size_t block, std::uint64_t generation) {
    if (block >= most_blocks)
      throw std::out_of_range("a rank has fewer blocks");
    ranks_.at(rank).words->blocks[block].progress = generation << progress_action_bits;
  }

  void abort() {
    for (Rank &rank : ranks_)
      __atomic_store_n(&rank.abort, 1, __ATOMIC_RELAXED);
  }

private:
  struct Rank {
    std::unique_ptr<RankWords> words;
    std::vector<unsigned char> windows, packets;
    unsigned char *segments[1];
    FailureSlot failure{};
    std::uint32_t abort = 0;
    std::uint64_t done = 0;
  };

  template <class Byte> static Byte *align(Byte *at) {
    return at + (16 - reinterpret_cast<std::uintptr_t>(at) % 16) % 16;
  }

  Launch launch(std::size_t r, const PackedPlan &plan, std::uintptr_t input,
                std::uintptr_t output, unsigned flags, std::uint64_t timeout_ns, int blocks) {
    Launch made = plan.launch(plan.bytes().data(), r, ranks_.size(), blocks);
    made.input = reinterpret_cast<const unsigned char *>(input);
    made.output = reinterpret_cast<unsigned char *>(output);
    made.flags = flags;
    made.offset[0] = input;
    made.offset[1] = output;
    made.peers = peers_.data();
    made.words = peers_[r].words;
    made.half = std::int64_t(half_);
    made.abort = &ranks_[r].abort;
    made.failure = &ranks_[r].failure;
    made.done = &ranks_[r].done;
    made.timeout_ns = timeout_ns;
    return made;
  }

  std::size_t half_;
  std::vector<Rank> ranks_;
  std::vector<Peer> peers_;
};

} // namespace

void bind_device(nb::module_ &m) {
  nb::class_<InterpretedWorld>(m, "InterpretedWorld")
      .def(nb::init<std::size_t, std::size_t>(), nb::arg("n"), nb::arg("half"))
      .def("run", &InterpretedWorld::run, nb::arg("calls"), nb::arg("blocks"),
           nb::arg("threads"), nb::arg("timeout_ns"))
      .def_static("fits_packets", &InterpretedWorld::fits_packets, nb::arg("plan"),
                  nb::arg("blocks"))
      .def("packets", &InterpretedWorld::packets, nb::arg("rank"))
      .def("set_generation", &InterpretedWorld::set_generation, nb::arg("generation"))
      .def("set_generation_of_block", &InterpretedWorld::set_generation_of_block,
           nb::arg("rank"), nb::arg("block"), nb::arg("generation"))
      .def("abort", &InterpretedWorld::abort);
}
