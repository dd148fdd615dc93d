// Three implementations; the first that the machine can run is chosen when the core is loaded.
//
//   folded  x86 with AVX-512 and VPCLMULQDQ: 256 bytes are multiplied forward by 256 bytes
//           at a time, as polynomials, and added to the data there; the instruction of the
//           next implementation sums the rest.
//   crc     the instruction of x86 and Arm. It has a latency of three cycles and a throughput
//           of one per cycle, so three parts of the data are summed at once and then joined:
//           a table carries the sum of a part over the length of those that follow.
//   table   eight bytes at a time, by tables, on any machine.
//
// A checksum is the remainder of the data, read as a polynomial over two elements with its
// highest power first, by 0x1EDC6F41. All numbers here are bit-reversed, as the
// instructions expect: bit 31 is the coefficient of the power 0.

#include "kernels/crc32c.hpp"

#include <array>
#include <bit>
#include <cstring>

#if defined(UNISONO_X86)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace unisono {

namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint32_t polynomial = 0x82f63b78;

using Table = std::array<std::uint32_t, 256>;

constexpr std::uint32_t times_x(std::uint32_t a) { return a >> 1 ^ (a & 1 ? polynomial : 0); }

constexpr std::uint32_t product(std::uint32_t a, std::uint32_t b) {
  std::uint32_t sum = 0;
  for (std::uint32_t bit = 1u << 31; bit != 0; bit >>= 1, b = times_x(b))
    if (a & bit)
      sum ^= b;
  return sum;
}

// x to a power, by squares.
constexpr std::uint32_t power(std::uint64_t exponent) {
  std::uint32_t result = 1u << 31, square = 1u << 30;
  for (; exponent != 0; exponent >>= 1, square = product(square, square))
    if (exponent & 1)
      result = product(result, square);
  return result;
}

constexpr std::array<Table, 8> make_steps() {
  std::array<Table, 8> t{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    t[0][i] = i;
    for (int bit = 0; bit < 8; ++bit)
      t[0][i] = times_x(t[0][i]);
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t i = 0; i < 256; ++i)
      t[k][i] = t[k - 1][i] >> 8 ^ t[0][t[k - 1][i] & 0xff];
  return t;
}

constexpr std::array<Table, 8> steps = make_steps();

std::uint64_t word_at(const unsigned char *p) {
  std::uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// These take and return the remainder itself; the caller complements it.

std::uint32_t by_table(const unsigned char *p, std::size_t bytes, std::uint32_t crc) {
  for (; bytes >= 8; bytes -= 8, p += 8) {
    const std::uint64_t word = word_at(p) ^ crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k)
      crc ^= steps[7 - k][word >> 8 * k & 0xff];
  }
  for (; bytes > 0; --bytes, ++p)
    crc = crc >> 8 ^ steps[0][(crc ^ *p) & 0xff];
  return crc;
}

#if defined(UNISONO_X86) || defined(__aarch64__)

// Inline assembly, so that only the functions that use them need the instruction set. The sum
// is 64 bits wide, half of which is zero, as the instruction of x86 has it.
inline std::uint64_t step8(std::uint64_t crc, std::uint64_t word) {
#if defined(UNISONO_X86)
  asm("crc32q %1, %0" : "+r"(crc) : "rm"(word));
  return crc;
#else
  asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
  return crc;
#endif
}

inline std::uint32_t step1(std::uint32_t crc, unsigned char byte) {
#if defined(UNISONO_X86)
  asm("crc32b %1, %0" : "+r"(crc) : "q"(byte));
#else
  asm(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(std::uint32_t(byte)));
#endif
  return crc;
}

// Carries a remainder over `Bytes` zero bytes: linear, so one table for each of its bytes.
template <std::size_t Bytes> constexpr std::array<Table, 4> make_carries() {
  std::array<Table, 4> t{};
  const std::uint32_t far = power(8 * Bytes);
  for (std::size_t k = 0; k < 4; ++k) {
    for (std::uint32_t bit = 1; bit < 256; bit <<= 1)
      t[k][bit] = product(far, bit << 8 * k);
    for (std::uint32_t i = 1; i < 256; ++i)
      t[k][i] = t[k][i & (i - 1)] ^ t[k][i & (0 - i)];
  }
  return t;
}

template <std::size_t Bytes> inline std::uint32_t carried(std::uint32_t crc) {
  static constexpr std::array<Table, 4> t = make_carries<Bytes>();
  return t[0][crc & 0xff] ^ t[1][crc >> 8 & 0xff] ^ t[2][crc >> 16 & 0xff] ^ t[3][crc >> 24];
}

// Sums all whole blocks of three parts.
template <std::size_t Part>
inline std::uint32_t in_threes(const unsigned char *&p, std::size_t &bytes, std::uint32_t crc) {
  for (; bytes >= 3 * Part; bytes -= 3 * Part, p += 3 * Part) {
    std::uint64_t first = crc, second = 0, third = 0;
    for (std::size_t i = 0; i < Part; i += 8) {
      first = step8(first, word_at(p + i));
      second = step8(second, word_at(p + Part + i));
      third = step8(third, word_at(p + 2 * Part + i));
    }
    crc = std::uint32_t(third) ^
          carried<Part>(std::uint32_t(second) ^ carried<Part>(std::uint32_t(first)));
  }
  return crc;
}

std::uint32_t by_instruction(const unsigned char *p, std::size_t bytes, std::uint32_t crc) {
  crc = in_threes<4096>(p, bytes, crc);
  crc = in_threes<256>(p, bytes, crc);
  for (; bytes >= 8; bytes -= 8, p += 8)
    crc = std::uint32_t(step8(crc, word_at(p)));
  for (; bytes > 0; --bytes, ++p)
    crc = step1(crc, *p);
  return crc;
}

#endif

#if defined(UNISONO_X86)

// The factors that carry the two halves of 128 bits forward. The product of two reversed
// numbers is one bit too low, and each factor has 32 unused bits of 64.
constexpr std::uint64_t forward_low(std::uint64_t bits) {
  return std::uint64_t(power(bits + 32)) << 1;
}
constexpr std::uint64_t forward_high(std::uint64_t bits) {
  return std::uint64_t(power(bits - 32)) << 1;
}

// What is summed next is fetched so many bytes earlier: the machine's own prefetching ends with
// each page, and what is sent is seldom in a cache. It may lie past the end, which is harmless.
constexpr std::size_t ahead = 4096;

#define UNISONO_FOLDS __attribute__((target("avx512f,vpclmulqdq")))

UNISONO_FOLDS inline __m512i fold(__m512i far, __m512i by, __m512i here) {
  const __m512i low = _mm512_clmulepi64_epi128(far, by, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(far, by, 0x11);
  return _mm512_ternarylogic_epi64(low, high, here, 0x96); // all three added
}

UNISONO_FOLDS inline __m512i both(std::uint64_t low, std::uint64_t high) {
  return _mm512_set_epi64((long long)high, (long long)low, (long long)high, (long long)low,
                          (long long)high, (long long)low, (long long)high, (long long)low);
}

UNISONO_FOLDS std::uint32_t by_folding(const unsigned char *p, std::size_t bytes,
                                       std::uint32_t crc) {
  if (bytes < 512)
    return by_instruction(p, bytes, crc);
  __m512i sum[4];
  for (std::size_t k = 0; k < 4; ++k)
    sum[k] = _mm512_loadu_si512(p + 64 * k);
  sum[0] = _mm512_xor_si512(sum[0], _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, crc));
  const __m512i over_four = both(forward_low(2048), forward_high(2048));
  for (bytes -= 256, p += 256; bytes >= 256; bytes -= 256, p += 256)
    for (std::size_t k = 0; k < 4; ++k) {
      _mm_prefetch(reinterpret_cast<const char *>(p) + 64 * k + ahead, _MM_HINT_T0);
      sum[k] = fold(sum[k], over_four, _mm512_loadu_si512(p + 64 * k));
    }
  const __m512i over_one = both(forward_low(512), forward_high(512));
  for (std::size_t k = 1; k < 4; ++k)
    sum[k] = fold(sum[k - 1], over_one, sum[k]);
  unsigned char rest[64];
  _mm512_storeu_si512(rest, sum[3]);
  _mm256_zeroupper(); // the code that follows is not compiled for registers this wide
  return by_instruction(p, bytes, by_instruction(rest, sizeof rest, 0));
}

#undef UNISONO_FOLDS

#endif

struct Way {
  const char *name;
  std::uint32_t (*run)(const unsigned char *, std::size_t, std::uint32_t);
};

// The implementations that this machine can run, the fastest first.
std::vector<Way> usable() {
  std::vector<Way> found;
#if defined(UNISONO_X86)
  __builtin_cpu_init();
  const bool instruction = __builtin_cpu_supports("sse4.2");
  if (instruction && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("vpclmulqdq"))
    found.push_back({"folded", by_folding});
#elif defined(__aarch64__)
  const bool instruction = (::getauxval(AT_HWCAP) & 1u << 7) != 0; // HWCAP_CRC32
#endif
#if defined(UNISONO_X86) || defined(__aarch64__)
  if (instruction)
    found.push_back({"crc", by_instruction});
#endif
  found.push_back({"table", by_table});
  return found;
}

const std::vector<Way> &ways() {
  static const std::vector<Way> found = usable();
  return found;
}

} // namespace

std::uint32_t crc32c(const void *data, std::size_t bytes, std::uint32_t seed) {
  static const auto best = ways().front().run;
  return ~best(static_cast<const unsigned char *>(data), bytes, ~seed);
}

std::vector<std::string> crc32c_ways() {
  std::vector<std::string> names;
  for (const Way &way : ways())
    names.emplace_back(way.name);
  return names;
}

std::uint32_t crc32c_by(std::size_t way, const void *data, std::size_t bytes,
                        std::uint32_t seed) {
  return ~ways().at(way).run(static_cast<const unsigned char *>(data), bytes, ~seed);
}

} // namespace unisono
