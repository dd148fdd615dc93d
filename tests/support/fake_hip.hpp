// What hipRTC knows without headers, declared so that a C++ compiler of the host can check
// the kernel's source for HIP: its syntax, names and types, not what it does.

#define __HIP__ 1
#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __HIP_MEMORY_SCOPE_SYSTEM 5
#define __HIP_MEMORY_SCOPE_AGENT 4
#define UNISONO_CLOCK_KHZ 100000

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
};
extern const dim3 blockIdx, gridDim, threadIdx, blockDim;

void __syncthreads();
void __threadfence_system();
int __clz(int);
int __syncthreads_or(int);
template <class T> T __hip_atomic_load(const T *, int order, int scope);
template <class T> void __hip_atomic_store(T *, T value, int order, int scope);
unsigned atomicExch(unsigned *, unsigned);
unsigned atomicOr(unsigned *, unsigned);
long long wall_clock64();
void __builtin_amdgcn_s_sleep(int);
