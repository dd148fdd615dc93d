// CUDA, compute capability 7.0 and later. Compiled by NVRTC, with functions for the device
// unless they say otherwise (--device-as-default-execution-space).

#define UNISONO_RTC
#define UNISONO_DEVICE __device__ __forceinline__
#define UNISONO_COLD __device__ __noinline__ // rarely called: kept out of the way
#define UNISONO_UNROLL _Pragma("unroll")
#define UNISONO_NO_UNROLL _Pragma("unroll 1")
// A buffer is in global memory, which is faster to access if it is known.
#define UNISONO_ASSUME_GLOBAL(address) __builtin_assume(__isGlobal(address))

#include "device/rtc_std.inl"

// How far words of ranks are ordered: over the system, or the device that all ranks share.
#ifdef UNISONO_ONE_DEVICE
#define UNISONO_SCOPE "gpu"
#else
#define UNISONO_SCOPE "sys"
#endif

namespace unisono::device {

template <class To, class From> UNISONO_DEVICE To bit_cast(const From &from) {
  return __builtin_bit_cast(To, from);
}

struct DeviceTarget {
  using Vector = uint4;
  static constexpr int warp_bits = 5;
  static constexpr int warp = 1 << warp_bits; // threads that run in step
  // How often a wait looks whether it is to be given up: about twice in a millisecond. To
  // read the host's memory and the clock slows down the blocks that move data: a broadcast
  // of 128 MiB on two ranks of an H200 took four times as long with 64.
  static constexpr unsigned looks_per_check = 1024;
  // Sources of elements of 8 bits that are loaded together; from 10.0 on more registers are
  // needed for the rest.
#if __CUDA_ARCH__ < 1000
  static constexpr int narrow_sources = 2;
#else
  static constexpr int narrow_sources = 1;
#endif
  // For the sums of a thread; before 8.0 more are needed for the rest.
#if __CUDA_ARCH__ < 800
  static constexpr int sum_registers = 8;
#else
  static constexpr int sum_registers = 16;
#endif

  // Packets of a thread that are loaded together, if their sums take no more registers than
  // that; and what its sums may take. From 10.0 and from 12.0 on, again less.
  static constexpr int packets_together = 2;
#if __CUDA_ARCH__ < 1000
  static constexpr int packet_registers = 8, packet_sums = 16;
#elif __CUDA_ARCH__ < 1200
  static constexpr int packet_registers = 4, packet_sums = 8;
#else
  static constexpr int packet_registers = 2, packet_sums = 8;
#endif

  // Read anew each time: else the compiler keeps what is made of them in registers, from one
  // end of the kernel to the other.
  UNISONO_DEVICE static int block() {
    int number;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(number));
    return number;
  }
  UNISONO_DEVICE static int thread() {
    int number;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    return number;
  }
  UNISONO_DEVICE static int blocks() { return int(gridDim.x); }
  UNISONO_DEVICE static int threads() { return int(blockDim.x); }
  UNISONO_DEVICE static void sync() { __syncthreads(); }
  UNISONO_DEVICE static bool any(bool value) { return __syncthreads_or(value) != 0; }

  UNISONO_DEVICE static std::uint64_t load_acquire(const std::uint64_t *word) {
    std::uint64_t value;
    asm volatile("ld.acquire." UNISONO_SCOPE ".global.u64 %0, [%1];"
                 : "=l"(value)
                 : "l"(word)
                 : "memory");
    return value;
  }
  // Of a word that the host writes.
  UNISONO_DEVICE static std::uint64_t load_acquire_host(const std::uint64_t *word) {
    std::uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  UNISONO_DEVICE static void store_release(std::uint64_t *word, std::uint64_t value) {
    asm volatile("st.release." UNISONO_SCOPE ".global.u64 [%0], %1;" ::"l"(word), "l"(value)
                 : "memory");
  }
  UNISONO_DEVICE static void store_relaxed(std::uint64_t *word, std::uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
  UNISONO_DEVICE static std::uint64_t load_relaxed(const std::uint64_t *word) {
    std::uint64_t value;
    asm volatile("ld.relaxed." UNISONO_SCOPE ".global.u64 %0, [%1];"
                 : "=l"(value)
                 : "l"(word)
                 : "memory");
    return value;
  }
  // 16 bytes of data in words with flags, each of which is loaded and stored at once: no
  // word of a vector is ordered before another one.
  UNISONO_DEVICE static void load_packets(const std::uint64_t *from,
                                          std::uint64_t (&words)[4]) {
    UNISONO_UNROLL
    for (int k = 0; k < 4; k += 2)
      asm volatile("ld.relaxed." UNISONO_SCOPE ".global.v2.u64 {%0, %1}, [%2];"
                   : "=l"(words[k]), "=l"(words[k + 1])
                   : "l"(from + k)
                   : "memory");
  }
  UNISONO_DEVICE static void store_packets(std::uint64_t *to, const std::uint64_t (&words)[4]) {
    UNISONO_UNROLL
    for (int k = 0; k < 4; k += 2)
      asm volatile("st.relaxed." UNISONO_SCOPE ".global.v2.u64 [%0], {%1, %2};" ::"l"(to + k),
                   "l"(words[k]), "l"(words[k + 1])
                   : "memory");
  }
  // The same of what also tells that everything before it was done: between fences.
  UNISONO_DEVICE static void load_arrival(const std::uint64_t *from,
                                          std::uint64_t (&words)[4]) {
    load_packets(from, words);
  }
  UNISONO_DEVICE static void store_arrival(std::uint64_t *to, const std::uint64_t (&words)[4]) {
    store_packets(to, words);
  }
  UNISONO_DEVICE static void fence() {
    asm volatile("fence.acq_rel." UNISONO_SCOPE ";" ::: "memory");
  }
  UNISONO_DEVICE static std::uint32_t load_relaxed(const std::uint32_t *word) {
    std::uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
  }
  UNISONO_DEVICE static std::uint32_t load_host(const std::uint32_t *word) {
    std::uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
  }
  UNISONO_DEVICE static void store_host(std::uint32_t *word, std::uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
  }
  UNISONO_DEVICE static bool claim(std::uint32_t *word) { return atomicExch(word, 1u) == 0; }
  UNISONO_DEVICE static void or_in_block(std::uint32_t *word, std::uint32_t value) {
    atomicOr(word, value);
  }
  UNISONO_DEVICE static int bit_width(unsigned value) { return 32 - __clz(int(value)); }
  UNISONO_DEVICE static std::uint64_t clock_ns() {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
  UNISONO_DEVICE static void pause(unsigned looks) {
    if (looks > 256)
      __nanosleep(64);
  }
};

} // namespace unisono::device
