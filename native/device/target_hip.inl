// HIP, by hipRTC. Compiles to the same interpreter; it was never run on an AMD device.

#define UNISONO_RTC
#define UNISONO_DEVICE __device__ __forceinline__
#define UNISONO_COLD __device__ __attribute__((noinline))
#define UNISONO_UNROLL _Pragma("unroll")
#define UNISONO_NO_UNROLL _Pragma("nounroll")
#define UNISONO_ASSUME_GLOBAL(address)
#define __grid_constant__
// The files shared with the CPU do not name the device.
#pragma clang force_cuda_host_device begin

#include "device/rtc_std.inl"

namespace unisono::device {

template <class To, class From> UNISONO_DEVICE To bit_cast(const From &from) {
  return __builtin_bit_cast(To, from);
}

struct DeviceTarget {
  using Vector = uint4;
  static constexpr int warp_bits = 6;
  static constexpr int warp = 1 << warp_bits; // threads that run in step
  static constexpr unsigned looks_per_check = 1024;
  static constexpr int narrow_sources = 2;
  static constexpr int sum_registers = 16;
  static constexpr int packets_together = 2;
  static constexpr int packet_registers = 8, packet_sums = 16;

  UNISONO_DEVICE static int block() { return int(blockIdx.x); }
  UNISONO_DEVICE static int blocks() { return int(gridDim.x); }
  UNISONO_DEVICE static int thread() { return int(threadIdx.x); }
  UNISONO_DEVICE static int threads() { return int(blockDim.x); }
  UNISONO_DEVICE static void sync() { __syncthreads(); }
  UNISONO_DEVICE static bool any(bool value) { return __syncthreads_or(value) != 0; }

  UNISONO_DEVICE static std::uint64_t load_acquire(const std::uint64_t *word) {
    return __hip_atomic_load(word, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
  }
  UNISONO_DEVICE static std::uint64_t load_acquire_host(const std::uint64_t *word) {
    return load_acquire(word);
  }
  UNISONO_DEVICE static void store_release(std::uint64_t *word, std::uint64_t value) {
    __hip_atomic_store(word, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
  }
  UNISONO_DEVICE static void store_relaxed(std::uint64_t *word, std::uint64_t value) {
    __hip_atomic_store(word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  }
  UNISONO_DEVICE static std::uint64_t load_relaxed(const std::uint64_t *word) {
    return __hip_atomic_load(word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  }
  UNISONO_DEVICE static void load_packets(const std::uint64_t *from,
                                          std::uint64_t (&words)[4]) {
    UNISONO_UNROLL
    for (int k = 0; k < 4; ++k)
      words[k] = load_relaxed(from + k);
  }
  UNISONO_DEVICE static void store_packets(std::uint64_t *to, const std::uint64_t (&words)[4]) {
    UNISONO_UNROLL
    for (int k = 0; k < 4; ++k)
      store_relaxed(to + k, words[k]);
  }
  UNISONO_DEVICE static void load_arrival(const std::uint64_t *from,
                                          std::uint64_t (&words)[4]) {
    load_packets(from, words);
  }
  UNISONO_DEVICE static void store_arrival(std::uint64_t *to, const std::uint64_t (&words)[4]) {
    store_packets(to, words);
  }
  UNISONO_DEVICE static void fence() { __threadfence_system(); }
  UNISONO_DEVICE static std::uint32_t load_relaxed(const std::uint32_t *word) {
    return __hip_atomic_load(word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  }
  UNISONO_DEVICE static std::uint32_t load_host(const std::uint32_t *word) {
    return __hip_atomic_load(word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  }
  UNISONO_DEVICE static void store_host(std::uint32_t *word, std::uint32_t value) {
    __hip_atomic_store(word, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
  }
  UNISONO_DEVICE static bool claim(std::uint32_t *word) { return atomicExch(word, 1u) == 0; }
  UNISONO_DEVICE static void or_in_block(std::uint32_t *word, std::uint32_t value) {
    atomicOr(word, value);
  }
  UNISONO_DEVICE static int bit_width(unsigned value) { return 32 - __clz(int(value)); }
  // The counter of the device runs at a fixed rate; UNISONO_CLOCK_KHZ is told by the host.
  UNISONO_DEVICE static std::uint64_t clock_ns() {
    return wall_clock64() * 1000000ull / UNISONO_CLOCK_KHZ;
  }
  UNISONO_DEVICE static void pause(unsigned looks) {
    if (looks > 256)
      __builtin_amdgcn_s_sleep(1);
  }
};

} // namespace unisono::device
