// The kernels of the codecs, written as plain loops for the compiler to vectorise. Included
// by one file per instruction set, which defines UNISONO_ISA as the name of a namespace; see
// kernels.inl for why everything has internal linkage and nothing of the library is used.

#include <cstddef>
#include <cstdint>

#include "codec.hpp"

namespace unisono::UNISONO_ISA {
namespace {

using U32 = std::uint32_t;
using U64 = std::uint64_t;

constexpr float as_float(U32 bits) { return __builtin_bit_cast(float, bits); }
constexpr U32 as_bits(float value) { return __builtin_bit_cast(U32, value); }

constexpr U32 kInfinity = 0x7f800000u; // and what is above, without its sign, is NaN
constexpr U32 kNaN = 0x7fc00000u;

constexpr U32 magnitude(float x) { return as_bits(x) & 0x7fffffffu; }
constexpr U32 least(U32 a, U32 b) { return a < b ? a : b; }
constexpr U32 greatest(U32 a, U32 b) { return a > b ? a : b; }

// Before a loop: what it writes is not what it reads, so vectors need no check for it.
#if defined(__clang__)
#define UNISONO_APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define UNISONO_APART _Pragma("GCC ivdep")
#endif

// A size that the compiler knows, where a function also takes others.
template <std::size_t N> struct Constant {
  constexpr operator std::size_t() const { return N; }
};

template <class T> struct __attribute__((packed, may_alias)) Anywhere {
  T value;
};
using Float = Anywhere<float>;

template <class T> T read(const std::byte *from) {
  return reinterpret_cast<const Anywhere<T> *>(from)->value;
}
template <class T> void write(std::byte *to, T value) {
  reinterpret_cast<Anywhere<T> *>(to)->value = value;
}

// Chance --------------------------------------------------------------------------------
//
// 32 random bits for each element, from the key and the element's place alone, so that it
// does not matter in which order, in how many parts or by how many threads elements are
// encoded. Groups of 32 get 64 bits by the finalizer of SplitMix64; an element of a group
// takes its own by the finalizer of MurmurHash3, in lanes of 32 bits.

constexpr std::size_t kGroup = 32, kRun = 128;

struct Luck {
  alignas(64) U32 of[kRun];

  // For as many groups as there are in `count` elements, the first of which is `group`.
  Luck(std::size_t count, U64 key, U64 group) {
    for (std::size_t begin = 0; begin < count; begin += kGroup, ++group) {
      U64 z = key + (group + 1) * 0x9e3779b97f4a7c15u;
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
      z ^= z >> 31;
      for (U32 i = 0; i < kGroup; ++i) {
        U32 h = static_cast<U32>(z) + i * 0x9e3779b9u;
        h = (h ^ (h >> 16)) * 0x85ebca6bu;
        h = (h ^ (h >> 13)) * 0xc2b2ae35u;
        of[begin + i] = h ^ (h >> 16) ^ static_cast<U32>(z >> 32);
      }
    }
  }
};

// `each(begin, size, luck)` for runs of elements, of which only the last may be shorter.
template <class Each>
void by_luck(std::size_t count, U64 key, U64 group, Each each) {
  std::size_t begin = 0;
  for (; begin + kRun <= count; begin += kRun, group += kRun / kGroup)
    each(begin, Constant<kRun>(), Luck(kRun, key, group));
  if (begin < count)
    each(begin, count - begin, Luck(count - begin, key, group));
}

template <std::size_t N, class Each>
void by_luck(Constant<N> count, U64 key, U64 group, Each each) {
  static_assert(N <= kRun);
  each(std::size_t(0), count, Luck(N, key, group));
}

// Small floats --------------------------------------------------------------------------

// E exponent and M mantissa bits below the sign. What is finite but too large becomes the
// largest value if it Saturates, and infinity if not.
template <class Bits, int E, int M, bool HasInfinity, bool Saturates> struct Small {
  using Stored = Bits;

  static constexpr U32 drop = 23 - M;
  static constexpr U32 bias = (1u << (E - 1)) - 1;
  static constexpr U32 all = (1u << (E + M)) - 1;
  static constexpr U32 infinity = ((1u << E) - 1) << M; // or the topmost exponent
  static constexpr U32 nan = HasInfinity ? infinity | (1u << (M - 1)) : all;
  static constexpr U32 largest = HasInfinity ? infinity - 1 : all - 1;
  // In bits of float32: the smallest normal value, and the one where this format ends.
  static constexpr U32 low = (128u - bias) << 23;
  static constexpr U32 widened(U32 code) { return (code << drop) + low - (1u << 23); }
  static constexpr U32 top = widened(Saturates ? largest : infinity);

  static constexpr U32 sign = all + 1;

  static U32 sign_of(float x) { return (as_bits(x) >> (31 - E - M)) & sign; }

  // To nearest, ties to even: `size` is a magnitude that does not round beyond the topmost
  // exponent. Adding a power of two that is large enough leaves the rounded mantissa in the
  // low bits of the sum, subnormals too. The exponent and the sign of the code are already
  // there, even numbers both, so that a tie is none of their business; above lies what is
  // cut off.
  static U32 rounded(U32 size, float x) {
    constexpr U32 large = (drop << 23) + ((0u - (low >> drop)) & (all | sign));
    const U32 exponent = greatest(size & kInfinity, low);
    const U32 other = exponent + (exponent >> drop) + (large ^ sign_of(x));
    return as_bits(as_float(size) + as_float(other));
  }

  // For what is finite and no larger than the largest value, or by less than a rounding.
  static Bits nearest_within(float x) { return static_cast<Bits>(rounded(magnitude(x), x)); }

  static Bits nearest(float x) {
    const U32 size = magnitude(x);
    return special(rounded(least(size, top), x), x);
  }

  static Bits special(U32 code, float x) {
    const U32 size = magnitude(x);
    if constexpr (HasInfinity && Saturates)
      code = size == kInfinity ? infinity | sign_of(x) : code;
    const bool is_nan = HasInfinity ? size > kInfinity : size >= kInfinity;
    return static_cast<Bits>(is_nan ? nan | sign_of(x) : code);
  }

  // Up with the probability that the dropped bits say.
  static Bits by_chance(float x, U32 random) {
    const U32 size = least(magnitude(x), top);
    const U32 exponent = greatest(size >> 23, low >> 23);
    const U32 away = drop + exponent - (size >> 23);
    const U32 shift = least(away, 31u);
    const U32 whole = (size & 0x7fffffu) | 0x800000u;
    const U32 mantissa = (whole + (random >> (32u - shift))) >> shift;
    const U32 code = (away > 31u ? 0u : mantissa) + ((exponent - (low >> 23)) << M);
    return special(code | sign_of(x), x);
  }

  // Exact, and no subnormals of float32 on the way, which are slow on some machines. Read
  // as if it were normal, a subnormal is too large; the line through it is the lower one.
  static float value(Bits stored) {
    const U32 size = stored & all;
    const float normal = as_float(widened(size));
    const float small = (normal + normal) - as_float(low);
    U32 bits = as_bits(small < normal ? small : normal);
    bits = (HasInfinity ? size >= infinity : size == all) ? (size << drop) | kInfinity : bits;
    return as_float(bits | ((static_cast<U32>(stored) << (31 - E - M)) & 0x80000000u));
  }
};

using Float16 = Small<std::uint16_t, 5, 10, true, false>;
using E4M3 = Small<std::uint8_t, 4, 3, false, true>;
using E5M2 = Small<std::uint8_t, 5, 2, true, true>;

// The upper half of a float32.
struct BFloat16 {
  using Stored = std::uint16_t;

  static Stored quiet(U32 rounded, float x) {
    const U32 nan = ((as_bits(x) >> 16) & 0x8000u) | 0x7fc0u;
    return static_cast<Stored>(magnitude(x) > kInfinity ? nan : rounded >> 16);
  }
  static Stored nearest(float x) {
    const U32 bits = as_bits(x);
    return quiet(bits + 0x7fffu + ((bits >> 16) & 1u), x);
  }
  static Stored by_chance(float x, U32 random) {
    const bool finite = magnitude(x) < kInfinity;
    return quiet(as_bits(x) + (finite ? random >> 16 : 0u), x);
  }
  static float value(Stored stored) { return as_float(static_cast<U32>(stored) << 16); }
};

// Whole numbers from -Most to Most -------------------------------------------------------

template <int Most> struct Whole {
  static constexpr float half_way = 12582912.0f; // 1.5 * 2^23: adding it rounds to nearest

  static U32 nearest(float x) { return as_bits(x + half_way) - as_bits(half_way); }

  static U32 by_chance(float x, U32 random) {
    constexpr float wide = 8388608.0f; // 2^23
    const U32 size = as_bits(as_float(magnitude(x)) * 65536.0f + wide) - as_bits(wide);
    const U32 whole = least((size + (random >> 16)) >> 16, Most);
    const U32 negative = 0u - (as_bits(x) >> 31);
    return (whole ^ negative) - negative;
  }
};

// Scales --------------------------------------------------------------------------------
//
// A scale is what the value 1 of the codes stands for. It is kept away from both ends of
// float32: above, so that the largest code stays finite; below, so that its inverse does.

constexpr float kLeastScale = as_float(1u << 23); // 2^-126

constexpr float largest_scale(double most_code) {
  constexpr double most_value = 0x1.fffffep127;
  float scale = static_cast<float>(most_value / most_code);
  while (most_code * static_cast<double>(scale) > most_value)
    scale = as_float(as_bits(scale) - 1);
  return scale;
}

// The largest magnitude, as bits: these are ordered as their floats are.
template <class Size> U32 absmax(const Float *from, Size count) {
  std::int32_t found = 0; // signed: older instruction sets compare nothing else
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t size = static_cast<std::int32_t>(magnitude(from[i].value));
    found = found > size ? found : size;
  }
  return static_cast<U32>(found);
}

// The same of the finite values alone.
__attribute__((noinline)) U32 finite_absmax(const Float *from, std::size_t count) {
  U32 found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const U32 size = magnitude(from[i].value);
    found = greatest(found, size < kInfinity ? size : 0u);
  }
  return found;
}

struct Scale {
  float value, inverse;
};

// A float32 before the codes: the largest value becomes the largest code.
template <int Most> struct Float32Scale {
  static constexpr std::size_t bytes = 4;
  static constexpr U32 most = kInfinity - 1; // up to here nothing exceeds the codes

  static Scale of(U32 largest) {
    constexpr float ceiling = largest_scale(Most);
    float scale = as_float(largest) / static_cast<float>(Most);
    scale = scale < kLeastScale ? kLeastScale : scale;
    scale = scale > ceiling ? ceiling : scale;
    return {scale, 1.0f / scale};
  }
  static void put(std::byte *to, float scale) { write(to, scale); }
  static float get(const std::byte *from) { return read<float>(from); }
};

// A power of two in one byte (E8M0, 255 is NaN): the smallest with which the largest value
// does not exceed 448, the largest code of E4M3.
struct PowerScale {
  static constexpr std::size_t bytes = 1;
  static constexpr U32 most = 0x7f600000u; // 448 * 2^119: up to here nothing does

  static Scale of(U32 largest) {
    // 448 is 1.75 * 2^8.
    const U32 above = (largest & 0x7fffffu) > 0x600000u;
    const U32 exponent = least(greatest((largest >> 23) + above, 9u) - 8u, 246u);
    return {as_float(exponent << 23), as_float((254u - exponent) << 23)};
  }
  static void put(std::byte *to, float scale) {
    write(to, static_cast<std::uint8_t>(as_bits(scale) >> 23));
  }
  static float get(const std::byte *from) {
    const U32 exponent = read<std::uint8_t>(from);
    const U32 bits = exponent == 0 ? 0x400000u : exponent << 23;
    return as_float(exponent == 255 ? kNaN : bits);
  }
};

// Blocks --------------------------------------------------------------------------------
//
// Each says how many bytes `count` elements of a block take, and encodes and decodes one;
// `take(i, value)` receives what was decoded.

template <class Format> struct Plain {
  using Stored = Anywhere<typename Format::Stored>;
  static constexpr std::size_t usual = 1;

  static constexpr std::size_t bytes(std::size_t count) { return sizeof(Stored) * count; }

  template <class Size>
  static void nearest(std::byte *to, const Float *from, Size count) {
    auto *out = reinterpret_cast<Stored *>(to);
    const std::size_t end = count;
    UNISONO_APART
    for (std::size_t i = 0; i < end; ++i)
      out[i].value = Format::nearest(from[i].value);
  }

  template <class Size>
  static void by_chance(std::byte *to, const Float *from, Size count, U64 key, U64 group) {
    auto *out = reinterpret_cast<Stored *>(to);
    by_luck(count, key, group, [=](std::size_t begin, auto size, const Luck &luck) {
      const std::size_t end = size;
      UNISONO_APART
      for (std::size_t i = 0; i < end; ++i)
        out[begin + i].value = Format::by_chance(from[begin + i].value, luck.of[i]);
    });
  }

  template <class Size, class Take>
  static void decode(const std::byte *from, Size count, Take take) {
    const auto *in = reinterpret_cast<const Stored *>(from);
    const std::size_t end = count;
    UNISONO_APART
    for (std::size_t i = 0; i < end; ++i)
      take(i, Format::value(in[i].value));
  }
};

void clear(std::byte *to, std::size_t bytes) { __builtin_memset(to, 0, bytes); }

// A code of one byte for each element, after a scale. Codes says what they are.
template <class Codes, class Scaling, std::size_t Usual> struct Scaled {
  using Stored = Anywhere<std::uint8_t>;
  static constexpr std::size_t usual = Usual;

  static std::size_t bytes(std::size_t count) { return Scaling::bytes + count; }

  // The scale of a block where anything may be; 0 for its inverse says that it is NaN.
  static Scale begin(std::byte *to, const Float *from, std::size_t count, U32 largest) {
    Scale scale{as_float(kNaN), 0.0f};
    if (largest < kInfinity)
      scale = Scaling::of(largest);
    else if (Codes::has_nan)
      scale = Scaling::of(finite_absmax(from, count));
    Scaling::put(to, scale.value);
    return scale;
  }

  template <class Size>
  static void nearest(std::byte *to, const Float *from, Size count) {
    const U32 largest = absmax(from, count);
    auto *out = reinterpret_cast<Stored *>(to + Scaling::bytes);
    const std::size_t end = count;
    if (largest > Scaling::most) { // rare
      const Scale scale = begin(to, from, count, largest);
      if (scale.inverse == 0.0f)
        return clear(to + Scaling::bytes, count);
      for (std::size_t i = 0; i < end; ++i)
        out[i].value = Codes::nearest(from[i].value * scale.inverse);
      return;
    }
    const Scale scale = Scaling::of(largest);
    Scaling::put(to, scale.value);
    UNISONO_APART
    for (std::size_t i = 0; i < end; ++i)
      out[i].value = Codes::nearest_within(from[i].value * scale.inverse);
  }

  template <class Size>
  static void by_chance(std::byte *to, const Float *from, Size count, U64 key, U64 group) {
    const Scale scale = begin(to, from, count, absmax(from, count));
    if (scale.inverse == 0.0f)
      return clear(to + Scaling::bytes, count);
    auto *out = reinterpret_cast<Stored *>(to + Scaling::bytes);
    by_luck(count, key, group, [=](std::size_t begin, auto size, const Luck &luck) {
      const std::size_t end = size;
      UNISONO_APART
      for (std::size_t i = 0; i < end; ++i)
        out[begin + i].value =
            Codes::by_chance(from[begin + i].value * scale.inverse, luck.of[i]);
    });
  }

  template <class Size, class Take>
  static void decode(const std::byte *from, Size count, Take take) {
    const float scale = Scaling::get(from);
    const auto *in = reinterpret_cast<const Stored *>(from + Scaling::bytes);
    const std::size_t end = count;
    UNISONO_APART
    for (std::size_t i = 0; i < end; ++i)
      take(i, Codes::value(in[i].value) * scale);
  }
};

// Small floats: the scale is that of the finite values; NaN and infinities have codes of
// their own.
template <class Format> struct Floats : Format {
  static constexpr bool has_nan = true;
};

// Whole numbers have no NaN: a block with a NaN or an infinity in it has NaN for its scale,
// and so becomes NaN as a whole; its codes are zeros.
struct Bytes {
  static constexpr bool has_nan = false;
  static std::uint8_t nearest_within(float x) {
    return static_cast<std::uint8_t>(Whole<127>::nearest(x));
  }
  static std::uint8_t nearest(float x) { return nearest_within(x); }
  static std::uint8_t by_chance(float x, U32 random) {
    return static_cast<std::uint8_t>(Whole<127>::by_chance(x, random));
  }
  static float value(std::uint8_t code) {
    return static_cast<float>(static_cast<std::int8_t>(code));
  }
};

template <class Scaling, class Size> Scale scale_or_nan(const Float *from, Size count) {
  const U32 largest = absmax(from, count);
  return largest < kInfinity ? Scaling::of(largest) : Scale{as_float(kNaN), 0.0f};
}

// Two to a byte: the first half of a block lies in the low four bits and the second half in
// the high ones, so that both are runs of bytes.
struct Int4 {
  using Stored = Anywhere<std::uint8_t>;
  using Scaling = Float32Scale<7>;
  static constexpr std::size_t usual = 128;

  static std::size_t bytes(std::size_t count) { return Scaling::bytes + (count + 1) / 2; }

  static std::uint8_t packed(U32 low, U32 high) {
    return static_cast<std::uint8_t>((low & 15u) | (high << 4));
  }

  template <class Size>
  static void nearest(std::byte *to, const Float *from, Size count) {
    const Scale scale = scale_or_nan<Scaling>(from, count);
    Scaling::put(to, scale.value);
    if (scale.value != scale.value)
      return clear(to + Scaling::bytes, (count + 1) / 2);
    auto *out = reinterpret_cast<Stored *>(to + Scaling::bytes);
    const std::size_t half = (count + 1) / 2, pairs = count / 2;
    UNISONO_APART
    for (std::size_t i = 0; i < pairs; ++i)
      out[i].value = packed(Whole<7>::nearest(from[i].value * scale.inverse),
                            Whole<7>::nearest(from[half + i].value * scale.inverse));
    if (count % 2 != 0)
      out[half - 1].value =
          packed(Whole<7>::nearest(from[half - 1].value * scale.inverse), 0);
  }

  template <class Size>
  static void by_chance(std::byte *to, const Float *from, Size count, U64 key, U64 group) {
    const Scale scale = scale_or_nan<Scaling>(from, count);
    Scaling::put(to, scale.value);
    if (scale.value != scale.value)
      return clear(to + Scaling::bytes, (count + 1) / 2);
    auto *out = reinterpret_cast<Stored *>(to + Scaling::bytes);
    const std::size_t half = (count + 1) / 2;
    // Place by place, so what is in both halves of a byte is not made at once.
    by_luck(count, key, group, [=](std::size_t begin, auto size, const Luck &luck) {
      std::uint8_t codes[kRun];
      const std::size_t end = size;
      UNISONO_APART
      for (std::size_t i = 0; i < end; ++i)
        codes[i] = static_cast<std::uint8_t>(
            Whole<7>::by_chance(from[begin + i].value * scale.inverse, luck.of[i]));
      const std::size_t lows = half < begin ? 0 : half - begin < end ? half - begin : end;
      for (std::size_t i = 0; i < lows; ++i)
        out[begin + i].value = packed(codes[i], 0);
      for (std::size_t i = lows; i < end; ++i)
        out[begin + i - half].value |= packed(0, codes[i]);
    });
  }

  static float low(U32 byte) {
    return static_cast<float>(static_cast<std::int32_t>(byte << 28) >> 28);
  }
  static float high(U32 byte) {
    return static_cast<float>(static_cast<std::int32_t>(byte << 24) >> 28);
  }

  template <class Size, class Take>
  static void decode(const std::byte *from, Size count, Take take) {
    const float scale = Scaling::get(from);
    const auto *in = reinterpret_cast<const Stored *>(from + Scaling::bytes);
    const std::size_t half = (count + 1) / 2, pairs = count / 2;
    UNISONO_APART
    for (std::size_t i = 0; i < half; ++i)
      take(i, low(in[i].value) * scale);
    UNISONO_APART
    for (std::size_t i = 0; i < pairs; ++i)
      take(half + i, high(in[i].value) * scale);
  }
};

// A table, since not every machine can shift each lane by another number.
struct Powers {
  U32 of[32];
  constexpr Powers() : of() {
    for (U32 i = 0; i < 32; ++i)
      of[i] = 1u << i;
  }
};
constexpr Powers kPowers;

// The sign, a bit, and the mean magnitude of the block: no other scale is nearer to it.
struct OneBit {
  using Stored = Anywhere<std::uint8_t>;
  static constexpr std::size_t usual = 128;

  static std::size_t bytes(std::size_t count) { return 4 + (count + 7) / 8; }

  // Sixteen sums side by side, folded in halves: one order, however wide the vectors are.
  // In float64, where no sum of a block overflows.
  static float mean(const Float *from, std::size_t count) {
    constexpr std::size_t lanes = 16;
    double sums[lanes] = {};
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes)
      for (std::size_t k = 0; k < lanes; ++k)
        sums[k] += static_cast<double>(as_float(magnitude(from[i + k].value)));
    for (std::size_t k = 0; i + k < count; ++k)
      sums[k] += static_cast<double>(as_float(magnitude(from[i + k].value)));
    for (std::size_t half = lanes / 2; half > 0; half /= 2)
      for (std::size_t k = 0; k < half; ++k)
        sums[k] += sums[k + half];
    return static_cast<float>(sums[0] / static_cast<double>(count));
  }

  static void nearest(std::byte *to, const Float *from, std::size_t count) {
    const float scale = mean(from, count);
    const bool finite = magnitude(scale) < kInfinity;
    write(to, finite ? scale : as_float(kNaN));
    auto *__restrict out = reinterpret_cast<Stored *>(to + 4);
    if (!finite)
      return clear(to + 4, (count + 7) / 8);
    for (std::size_t begin = 0; begin < count; begin += 8) {
      const std::size_t size = count - begin < 8 ? count - begin : 8;
      U32 signs = 0;
      for (std::size_t k = 0; k < size; ++k)
        signs |= (as_bits(from[begin + k].value) >> 31) << k;
      out[begin / 8].value = static_cast<std::uint8_t>(signs);
    }
  }

  // A sign is not rounded, so chance has no say.
  static void by_chance(std::byte *to, const Float *from, std::size_t count, U64, U64) {
    nearest(to, from, count);
  }

  template <class Size, class Take>
  static void decode(const std::byte *from, Size count, Take take) {
    const U32 plus = read<U32>(from), minus = plus ^ 0x80000000u;
    const auto value = [=](U32 signs, std::size_t i) {
      return as_float((signs & kPowers.of[i]) != 0 ? minus : plus);
    };
    from += 4;
    const std::size_t whole = count / 32 * 32, rest = count % 32;
    for (std::size_t begin = 0; begin < whole; begin += 32) {
      const U32 signs = read<U32>(from + begin / 8);
      UNISONO_APART
      for (std::size_t i = 0; i < 32; ++i)
        take(begin + i, value(signs, i));
    }
    for (std::size_t i = 0; i < rest; ++i)
      take(whole + i, value(read<std::uint8_t>(from + (whole + i) / 8), i % 8));
  }
};

// Rows of blocks ------------------------------------------------------------------------

template <class Block> std::size_t bytes(std::size_t block, std::size_t count) {
  const std::size_t rest = count % block;
  return count / block * Block::bytes(block) + (rest == 0 ? 0 : Block::bytes(rest));
}

// `each(begin, size, offset)` for all blocks; those of the usual size with a constant, for
// which the compiler need not ask how many there are. What has no scale is walked in runs.
template <class Block, class Each>
void for_blocks(std::size_t count, std::size_t block, Each each) {
  constexpr std::size_t usual = Block::usual == 1 ? 128 : Block::usual;
  block = Block::usual == 1 ? usual : block;
  const std::size_t step = Block::bytes(block), whole = count / block;
  if (block == usual)
    for (std::size_t b = 0; b < whole; ++b)
      each(b * usual, Constant<usual>(), b * Block::bytes(usual));
  else
    for (std::size_t b = 0; b < whole; ++b)
      each(b * block, block, b * step);
  if (whole * block < count)
    each(whole * block, count - whole * block, whole * step);
}

// Asks for what is read in a few blocks' time, since a block is worked on for so long that
// the machine does not look so far ahead by itself. It may lie behind the end: nothing is
// read.
template <class Size> void look_ahead(const Float *from, Size count) {
  constexpr std::size_t distance = 1024, line = 16;
  for (std::size_t i = 0; i < count; i += line)
    __builtin_prefetch(reinterpret_cast<const char *>(from) + (distance + i) * sizeof *from);
}

template <class Block>
void encode_at(std::byte *to, const float *from, std::size_t count, std::size_t block,
               U64 key, U64 first) {
  const auto *in = reinterpret_cast<const Float *>(from);
  if (key == 0)
    for_blocks<Block>(count, block, [=](auto begin, auto size, auto offset) {
      look_ahead(in + begin, size);
      Block::nearest(to + offset, in + begin, size);
    });
  else
    for_blocks<Block>(count, block, [=](auto begin, auto size, auto offset) {
      Block::by_chance(to + offset, in + begin, size, key, (first + begin) / kGroup);
    });
}

template <class Block>
void encode(std::byte *to, const float *from, std::size_t count, std::size_t block, U64 key) {
  encode_at<Block>(to, from, count, block, key, 0);
}

template <class Block>
void decode(float *to, const std::byte *from, std::size_t count, std::size_t block) {
  auto *out = reinterpret_cast<Float *>(to);
  for_blocks<Block>(count, block, [=](auto begin, auto size, auto offset) {
    Float *here = out + begin;
    Block::decode(from + offset, size,
                  [=](std::size_t i, float value) { here[i].value = value; });
  });
}

template <class Block>
void add(float *into, const std::byte *from, std::size_t count, std::size_t block) {
  auto *out = reinterpret_cast<Float *>(into);
  for_blocks<Block>(count, block, [=](auto begin, auto size, auto offset) {
    Float *here = out + begin;
    Block::decode(from + offset, size,
                  [=](std::size_t i, float value) { here[i].value += value; });
  });
}

template <class Block> constexpr Codec codec() {
  return {Block::usual, bytes<Block>, encode<Block>, decode<Block>, add<Block>,
          encode_at<Block>};
}

constexpr Codec kCodecs[] = {
    codec<Plain<Float16>>(),
    codec<Plain<BFloat16>>(),
    codec<Scaled<Floats<E4M3>, Float32Scale<448>, 128>>(),
    codec<Scaled<Floats<E5M2>, Float32Scale<57344>, 128>>(),
    codec<Scaled<Floats<E4M3>, PowerScale, 32>>(),
    codec<Scaled<Bytes, Float32Scale<127>, 128>>(),
    codec<Int4>(),
    codec<OneBit>(),
};

} // namespace

const Codec *codecs() { return kCodecs; }

} // namespace unisono::UNISONO_ISA
