// The kernel of one element type and operation, which the compiler at run time is told:
// UNISONO_DTYPE and UNISONO_OP, numbers of kernels/dtypes.hpp.

#if defined(__HIP__)
#include "device/target_hip.inl"
#else
#include "device/target_cuda.inl"
#endif

#include "device/move.cuh"

using namespace unisono;
using namespace unisono::device;

using Mover = Reduce<ElementOf<DType(UNISONO_DTYPE)>::Type, OperationOf<Op(UNISONO_OP)>::Type>;

using Memory = BlockMemory<DeviceTarget::Vector>;

extern "C" __global__ void __launch_bounds__(512, 2)
    unisono_interpret(const __grid_constant__ Launch launch) {
  __shared__ Memory memory;
  Interpreter<DeviceTarget, Mover>(launch, DeviceTarget(), memory).run();
}

// For small calls.
extern "C" __global__ void __launch_bounds__(512, 2)
    unisono_exchange(const __grid_constant__ Launch launch) {
  __shared__ Memory memory;
  Interpreter<DeviceTarget, Mover>(launch, DeviceTarget(), memory).run_packets();
}
