// Reductions: several sources into one result, in one pass, in the order given.
//
// The element types and operations, and a table of kernels for the machine this runs on.
// The kernels themselves are in reduce.inl, compiled once for each instruction set; here
// is only what both sides must agree on. src/unisono/dtypes.py numbers types and
// operations in the same order.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace unisono {

enum class DType : std::uint8_t {
  bool_, int8, int16, int32, int64, uint8, uint16, uint32, uint64,
  float16, bfloat16, float32, float64, complex64, complex128,
  float8_e4m3fn, float8_e5m2, count
};

enum class Op : std::uint8_t { sum, prod, min, max, band, bor, bxor, count };

constexpr std::size_t item_size(DType dtype) {
  constexpr std::size_t sizes[] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 1, 1};
  return sizes[static_cast<std::size_t>(dtype)];
}

// out[i] = op(sources[0][i], sources[1][i], ...) / divisor. Types of 16 and 8 bits are
// added up in float32 and rounded once. `out` may be one of the sources.
using Kernel = void (*)(void *out, const void *const *sources, std::size_t num_sources,
                        std::size_t count, std::uint32_t divisor);

// The instruction sets that there are kernels for and this machine has, the best first.
std::vector<std::string> instruction_sets();

// The kernel for one of those; null where the operation has no meaning for the type.
Kernel find_kernel(DType dtype, Op op, std::size_t instruction_set = 0);

} // namespace unisono
