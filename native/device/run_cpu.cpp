#include "device/run_cpu.hpp"

#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "device/target_cpu.hpp"

#include "device/move.cuh"

namespace unisono::device {

namespace {

// The interpreter is compiled once; what differs by type and operation is called.
struct AnyMover {
  using Function = void (*)(const CpuTarget &, const Movement &, std::int64_t);
  static thread_local Function function;
  static void move(const CpuTarget &target, const Movement &m, std::int64_t itemsize) {
    function(target, m, itemsize);
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
  BlockMemory memory{};
};

} // namespace

bool run_on_cpu(const Launch &launch, int blocks, int threads, DType dtype, Op op) {
  const AnyMover::Function mover = by_dtype<Movers>(dtype, op);
  if (mover == nullptr)
    return false;
  std::deque<Block> shared;
  std::vector<std::jthread> running;
  running.reserve(std::size_t(blocks) * std::size_t(threads));
  for (int b = 0; b < blocks; ++b) {
    Block &block = shared.emplace_back(threads);
    for (int t = 0; t < threads; ++t)
      running.emplace_back([&, b, t] {
        AnyMover::function = mover;
        CpuTarget target(b, blocks, t, threads, block.barrier);
        Interpreter<CpuTarget, AnyMover>(launch, target, block.memory).run();
      });
  }
  return true; // when all threads have ended
}

} // namespace unisono::device
