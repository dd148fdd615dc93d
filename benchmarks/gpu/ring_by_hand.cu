// all_reduce of a few bytes by the ring algorithm, written for this one case: N ranks, one
// block and one float4 each, and no checks. What a step takes here no interpreter can save:
// one poll, one load, one store, and one release.

struct Arguments {
  const float4 *input; // N of them
  float4 *output;      // of this rank
  float4 *windows[N];  // of each rank: 2 N places, for two calls in turn
  unsigned *flags[N];  // of each rank: the steps that it has done
  unsigned *epoch;     // of this rank: the calls that it has done
  long long rank;
};

__device__ void await(const unsigned *flag, unsigned least) {
  unsigned seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  } while (int(seen - least) < 0);
}

__device__ void publish(unsigned *flag, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

extern "C" __global__ void ring_by_hand(const __grid_constant__ Arguments a) {
  const int rank = int(a.rank), left = (rank + N - 1) % N;
  const unsigned call = *a.epoch, steps = 2 * N - 1, first = call * steps;
  float4 *mine = a.windows[rank] + call % 2 * N;
  const float4 *theirs = a.windows[left] + call % 2 * N;
  const bool works = threadIdx.x < 1, publishes = threadIdx.x == 0;
  for (int step = 0; step < 2 * N - 1; ++step) {
    const int chunk = (rank - step + 2 * N) % N;
    if (step > 0 && threadIdx.x == 0)
      await(a.flags[left], first + unsigned(step));
    __syncthreads();
    if (works) {
      float4 value = step < N ? a.input[chunk] : theirs[chunk];
      if (step > 0 && step < N) {
        const float4 more = theirs[chunk];
        value = {value.x + more.x, value.y + more.y, value.z + more.z, value.w + more.w};
      }
      mine[chunk] = value;
      if (step >= N - 1)
        a.output[chunk] = value;
    }
    __syncthreads();
    if (publishes)
      publish(a.flags[rank], first + unsigned(step) + 1);
  }
  // The window of this call is written again in the one after the next, which begins when the
  // right neighbour has read it: it is then in the next call.
  if (publishes) {
    const int right = (rank + 1) % N;
    await(a.flags[right], first + steps);
    *a.epoch = call + 1;
  }
}
