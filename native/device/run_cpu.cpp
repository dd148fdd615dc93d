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
struct AnyMover {
  using Function = void (*)(const CpuTarget &, const Movement &, unsigned);
  static thread_local Function function;
  static void move(const CpuTarget &target, const Movement &m, unsigned misaligned) {
    failpoint("device.move");
    function(target, m, misaligned);
  }
};
thread_local AnyMover::Function AnyMover::function = nullptr;

struct Movers {
  template <DType D, Op O> static AnyMover::Function of() {
    if constexpr (has_meaning<D, O>())
      return Reduce<typename ElementOf<D>::Type,
                    typename OperationOf<O>::Type>::template move<CpuTarget>;
    else
      return nullptr;
  }
};

#include "kernels/dispatch.inl"

struct Block {
  explicit Block(int threads) : barrier(threads) {}
  CpuBlockBarrier barrier;
  BlockMemory<CpuTarget::Vector> memory{};
};

} // namespace

bool runs_on_cpu(DType dtype, Op op) { return by_dtype<Movers>(dtype, op) != nullptr; }

bool run_on_cpu(CpuThreads &pool, const Launch &launch, int blocks, int threads, DType dtype,
                Op op) {
  const AnyMover::Function mover = by_dtype<Movers>(dtype, op);
  if (mover == nullptr)
    return false;
  std::deque<Block> shared;
  for (int b = 0; b < blocks; ++b)
    shared.emplace_back(threads);
  pool.run(blocks * threads, [&](int index) {
    const int b = index / threads;
    AnyMover::function = mover;
    CpuTarget target(b, blocks, index % threads, threads, shared[std::size_t(b)].barrier);
    Interpreter<CpuTarget, AnyMover>(launch, target, shared[std::size_t(b)].memory).run();
  });
  return true;
}

bool run_on_cpu(const Launch &launch, int blocks, int threads, DType dtype, Op op) {
  CpuThreads pool;
  return run_on_cpu(pool, launch, blocks, threads, dtype, op);
}

} // namespace unisono::device
