// Conversions of one value: random bits, small floats, integers, and scales.
//
// They have no branches, so that loops over them become vector instructions, and without fused
// multiply-add, so that their bits are those of src/unisono/codecs/reference.py.

// Included inside the unnamed namespace of codec.inl: see reduce.inl for why.

using U32 = std::uint32_t;
using U64 = std::uint64_t;

constexpr float as_float(U32 bits) { return __builtin_bit_cast(float, bits); }
constexpr U32 as_bits(float value) { return __builtin_bit_cast(U32, value); }

constexpr U32 kInfinity = 0x7f800000u; // and what is above, without its sign, is NaN
constexpr U32 kNaN = 0x7fc00000u;

constexpr U32 magnitude(float x) { return as_bits(x) & 0x7fffffffu; }
constexpr U32 least(U32 a, U32 b) { return a < b ? a : b; }
constexpr U32 greatest(U32 a, U32 b) { return a > b ? a : b; }

// Before a loop: its output does not overlap its input, so vector code needs no check.
#if defined(__clang__)
#define UNISONO_APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define UNISONO_APART _Pragma("GCC ivdep")
#endif

// A size that is known at compile time, for functions that also take other sizes.
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

// Random bits ---------------------------------------------------------------------------
//
// 32 random bits for each element, from the key and the index of the element alone, so that
// the result does not depend on the order, the number of parts or the number of threads.
// Groups of 32 get 64 bits by the finalizer of SplitMix64; each element of a group gets its
// own by the finalizer of MurmurHash3, in lanes of 32 bits.

constexpr std::size_t kGroup = 32, kRun = 128;

struct RandomBits {
  alignas(64) U32 of[kRun];

  // For `count` elements, the first of which is in the group `group`.
  RandomBits(std::size_t count, U64 key, U64 group) {
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

// Calls `each(begin, size, random)` for runs of elements; only the last may be shorter.
template <class Each>
void with_random_bits(std::size_t count, U64 key, U64 group, Each each) {
  std::size_t begin = 0;
  for (; begin + kRun <= count; begin += kRun, group += kRun / kGroup)
    each(begin, Constant<kRun>(), RandomBits(kRun, key, group));
  if (begin < count)
    each(begin, count - begin, RandomBits(count - begin, key, group));
}

template <std::size_t N, class Each>
void with_random_bits(Constant<N> count, U64 key, U64 group, Each each) {
  static_assert(N <= kRun);
  each(std::size_t(0), count, RandomBits(N, key, group));
}

// Small floats --------------------------------------------------------------------------

// E exponent and M mantissa bits below the sign. A finite value that is too large becomes
// the largest value if it Saturates, and infinity if not.
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
  // there; both are even, so they do not affect ties. The bits above are cut off.
  static U32 rounded(U32 size, float x) {
    constexpr U32 large = (drop << 23) + ((0u - (low >> drop)) & (all | sign));
    const U32 exponent = greatest(size & kInfinity, low);
    const U32 other = exponent + (exponent >> drop) + (large ^ sign_of(x));
    return as_bits(as_float(size) + as_float(other));
  }

  // For finite values that do not round beyond the largest value.
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

  // Rounds up with the probability that the dropped bits give.
  static Bits stochastic(float x, U32 random) {
    const U32 size = least(magnitude(x), top);
    const U32 exponent = greatest(size >> 23, low >> 23);
    const U32 away = drop + exponent - (size >> 23);
    const U32 shift = least(away, 31u);
    const U32 whole = (size & 0x7fffffu) | 0x800000u;
    const U32 mantissa = (whole + (random >> (32u - shift))) >> shift;
    const U32 code = (away > 31u ? 0u : mantissa) + ((exponent - (low >> 23)) << M);
    return special(code | sign_of(x), x);
  }

  // Exact, without intermediate subnormals of float32, which are slow on some machines. A
  // subnormal that is read as a normal value is too large; the subtraction corrects it.
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
  static Stored stochastic(float x, U32 random) {
    const bool finite = magnitude(x) < kInfinity;
    return quiet(as_bits(x) + (finite ? random >> 16 : 0u), x);
  }
  static float value(Stored stored) { return as_float(static_cast<U32>(stored) << 16); }
};

// Integers from -Most to Most ------------------------------------------------------------

template <int Most> struct Whole {
  static constexpr float half_way = 12582912.0f; // 1.5 * 2^23: adding it rounds to nearest

  static U32 nearest(float x) { return as_bits(x + half_way) - as_bits(half_way); }

  static U32 stochastic(float x, U32 random) {
    constexpr float wide = 8388608.0f; // 2^23
    const U32 size = as_bits(as_float(magnitude(x)) * 65536.0f + wide) - as_bits(wide);
    const U32 whole = least((size + (random >> 16)) >> 16, Most);
    const U32 negative = 0u - (as_bits(x) >> 31);
    return (whole ^ negative) - negative;
  }
};

// Scales --------------------------------------------------------------------------------
//
// A scale is the value of code 1. It is kept away from both ends of the range of float32:
// above, so that the largest code decodes to a finite value; below, so that the inverse of
// the scale is finite.

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
  std::int32_t found = 0; // signed: older instruction sets have signed comparisons only
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t size = static_cast<std::int32_t>(magnitude(from[i].value));
    found = found > size ? found : size;
  }
  return static_cast<U32>(found);
}

// The same for the finite values alone.
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
  static constexpr U32 most = kInfinity - 1; // up to here no value exceeds the codes

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
  static constexpr U32 most = 0x7f600000u; // 448 * 2^119: up to here no value does

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
