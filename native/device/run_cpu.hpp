// Launches of the interpreter on threads of the CPU.

#pragma once

#include "device/cpu_threads.hpp"
#include "device/launch.hpp"
#include "kernels/dtypes.hpp"

namespace unisono::device {

// Runs a launch of `blocks` blocks of `threads` threads each, and returns when it has ended.
// False if the operation has no meaning for the type.
bool run_on_cpu(CpuThreads &pool, const Launch &launch, int blocks, int threads, DType dtype,
                Op op);
// The same, with threads that are made for this launch alone.
bool run_on_cpu(const Launch &launch, int blocks, int threads, DType dtype, Op op);

// Whether the operation has a meaning for the type.
bool runs_on_cpu(DType dtype, Op op);

} // namespace unisono::device
