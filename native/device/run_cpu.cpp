#include "device/run_cpu.hpp"

#include <cstdint>
#include <deque>
#include <type_traits>

#include "device/target_cpu.hpp"

#include "device/move.cuh"
#include "support/failpoint.hpp"

namespace unisono::device {

namespace {

// The interpreter is compiled once; what differs by type and operation is called.
using CpuMemory = BlockMemory<CpuTarget::Vector>;
using CpuPackets = Packets<CpuTarget, CpuMemory>;

struct Functions {
  void (*move)(const CpuTarget &, const Movement &, unsigned) = nullptr;
  bool (*exchange)(CpuPackets &) = nullptr;
};

struct AnyMover {
  static thread_local Functions functions;
  static void move(const CpuTarget &target, const Movement &m, unsigned misaligned) {
    failpoint("device.move");
    functions.move(target, m, misaligned);
  }
  static bool exchange(CpuPackets &packets) {
    failpoint("device.exchange");
    return functions.exchange(packets);
  }
};
thread_local Functions AnyMover::functions;

struct Movers {
  template <DType D, Op O> static Functions of() {
    if constexpr (has_meaning<D, O>()) {
      using Mover = Reduce<typename ElementOf<D>::Type, typename OperationOf<O>::Type>;
      return {Mover::template move<CpuTarget>, Mover::template exchange<CpuPackets>};
    } else {
      return {};
    }
  }
};

#include "kernels/dispatch.inl"

struct Block {
  explicit Block(int threads) : barrier(threads) {}
  CpuBlockBarrier barrier;
  CpuMemory memory{};
};

} // namespace

bool runs_on_cpu(DType dtype, Op op) { return by_dtype<Movers>(dtype, op).move != nullptr; }

bool run_on_cpu(CpuThreads &pool, const Launch &launch, int blocks, int threads, DType dtype,
                Op op) {
  const Functions functions = by_dtype<Movers>(dtype, op);
  if (functions.move == nullptr)
    return false;
  std::deque<Block> shared;
  for (int b = 0; b < blocks; ++b)
    shared.emplace_back(threads);
  pool.run(blocks * threads, [&](int index) {
    const int b = index / threads;
    AnyMover::functions = functions;
    CpuTarget target(b, blocks, index % threads, threads, shared[std::size_t(b)].barrier);
    Interpreter<CpuTarget, AnyMover> block(launch, target, shared[std::size_t(b)].memory);
    if ((launch.flags & sends_packets) != 0)
      block.run_packets();
    else
      block.run();
  });
  return true;
}

bool run_on_cpu(const Launch &launch, int blocks, int threads, DType dtype, Op op) {
  CpuThreads pool;
  return run_on_cpu(pool, launch, blocks, threads, dtype, op);
}

} // namespace unisono::device
