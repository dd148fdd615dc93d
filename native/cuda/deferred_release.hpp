// Releases device memory on a thread of its own, and does there what else may wait for kernels.
//
// To free memory the driver waits for kernels, and a kernel may wait for another rank, which
// may be the thread that wants to free: so no thread of a rank ever frees by itself, and
// memory is freed when no collective is in flight (launch_gate.hpp).

#pragma once

#include <functional>

namespace unisono::cuda {

// Calls `release` soon, on the thread for that, without Python's lock, while no collective is
// in flight. If `is_ready` is given, only when that says so, which is asked from time to time.
// What is left when the process ends is the driver's to release; a forked child releases
// nothing.
void release_later(std::function<void()> release, std::function<bool()> is_ready = {});

// The same for a step that may wait for the collectives in flight: they go on meanwhile.
void run_later(std::function<void()> step, std::function<bool()> is_ready = {});

// Waits until everything that was to be released has been, or a second.
void await_releases();

} // namespace unisono::cuda
