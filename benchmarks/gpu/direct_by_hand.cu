// all_reduce by the direct algorithm, written for this one case: float32, N ranks, buffers
// that all ranks can access, a count that is a multiple of 4 N. For comparison with the
// interpreter.

struct Arguments {
  const float4 *inputs[N];
  float4 *outputs[N];
  unsigned *flags[N]; // of each rank: one for each rank and block
  unsigned *epochs;   // of this rank: one for each block
  long long count;    // of float4 in a chunk
  long long rank;
};

constexpr int most_blocks = 256;

__device__ void meet(const Arguments &a, unsigned epoch) {
  __syncthreads();
  const int q = threadIdx.x;
  if (q < N) {
    unsigned *theirs = a.flags[q] + a.rank * most_blocks + blockIdx.x;
    const unsigned *mine = a.flags[a.rank] + q * most_blocks + blockIdx.x;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(epoch) : "memory");
    unsigned seen;
    do {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
    } while (seen != epoch);
  }
  __syncthreads();
}

__device__ void add(float4 &to, const float4 &x) {
  to.x += x.x;
  to.y += x.y;
  to.z += x.z;
  to.w += x.w;
}

extern "C" __global__ void __launch_bounds__(512, 2)
    direct_by_hand(const __grid_constant__ Arguments a) {
  const unsigned epoch = a.epochs[blockIdx.x];
  meet(a, epoch + 1);
  const long long first = a.rank * a.count, stride = (long long)gridDim.x * blockDim.x;
  constexpr int packs = 4;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + (packs - 1) * stride < a.count; i += packs * stride) {
    float4 totals[packs];
#pragma unroll
    for (int k = 0; k < packs; ++k)
      totals[k] = a.inputs[0][first + i + k * stride];
#pragma unroll
    for (int q = 1; q < N; ++q) {
      float4 next[packs];
#pragma unroll
      for (int k = 0; k < packs; ++k)
        next[k] = a.inputs[q][first + i + k * stride];
#pragma unroll
      for (int k = 0; k < packs; ++k)
        add(totals[k], next[k]);
    }
#pragma unroll
    for (int q = 0; q < N; ++q)
#pragma unroll
      for (int k = 0; k < packs; ++k)
        a.outputs[q][first + i + k * stride] = totals[k];
  }
  for (; i < a.count; i += stride) {
    float4 total = a.inputs[0][first + i];
#pragma unroll
    for (int q = 1; q < N; ++q)
      add(total, a.inputs[q][first + i]);
#pragma unroll
    for (int q = 0; q < N; ++q)
      a.outputs[q][first + i] = total;
  }
  meet(a, epoch + 2);
  if (threadIdx.x == 0)
    a.epochs[blockIdx.x] = epoch + 2;
}
