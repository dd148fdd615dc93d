// Reductions: several sources into one result, in one pass, in the order given.
//
// A table of kernels for the machine this runs on. The kernels themselves are in reduce.inl,
// compiled once for each instruction set; here is only what both sides must agree on.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/dtypes.hpp"

namespace unisono {

// out[i] = op(sources[0][i], sources[1][i], ...) / divisor. Types of 16 and 8 bits are
// added up in float32 and rounded once. `out` may be one of the sources.
using Kernel = void (*)(void *out, const void *const *sources, std::size_t num_sources,
                        std::size_t count, std::uint32_t divisor);

// The instruction sets that there are kernels for and this machine has, the best first.
std::vector<std::string> instruction_sets();

// The kernel for one of those; null where the operation has no meaning for the type.
Kernel find_kernel(DType dtype, Op op, std::size_t instruction_set = 0);

} // namespace unisono
