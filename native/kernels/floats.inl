// Small floating-point types as bits, to float32 and back.
//
// Without branches, so that loops over them become vector instructions. Decoding is exact;
// encoding rounds to nearest, ties to even. A value too large becomes infinity, or NaN in
// float8_e4m3fn, which has no infinity. A NaN stays one, with its sign.

// Included inside the unnamed namespace of reduce.inl: see there why.

constexpr float as_float(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
constexpr std::uint32_t as_bits(float value) {
  return __builtin_bit_cast(std::uint32_t, value);
}

constexpr float power_of_two(int exponent) {
  return as_float(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// A format with E exponent and M mantissa bits below the sign.
template <class Bits, int E, int M, bool HasInfinity> struct Small {
  Bits bits;

  static constexpr int bias = (1 << (E - 1)) - 1;
  static constexpr std::uint32_t all = (1u << (E + M)) - 1;       // without the sign
  static constexpr std::uint32_t infinity = ((1u << E) - 1) << M; // or the top exponent
  static constexpr std::uint32_t nan = HasInfinity ? infinity | (1u << (M - 1)) : all;
  static constexpr std::uint32_t largest = HasInfinity ? infinity - 1 : all - 1;
  static constexpr bool has_infinity = HasInfinity;
  // For encoding: the bits that float32 has more, and the exponents that it has below.
  static constexpr int drop = 23 - M;
  static constexpr std::uint32_t rebias = (127u - bias) << M;
  static constexpr std::uint32_t smallest_normal = (128u - bias) << 23;
  // Adding this constant to a subnormal leaves its rounded mantissa in the low bits.
  static constexpr float shift = power_of_two(1 - bias - M + 23);
  // The float32 bits of what would follow the largest value.
  static constexpr std::uint32_t beyond = (largest + 1 + rebias) << drop;

  static float decode(Small x) {
    const std::uint32_t magnitude = x.bits & all;
    const std::uint32_t sign = static_cast<std::uint32_t>(x.bits >> (E + M)) << 31;
    // Widened in place the exponent is too small by the difference of the biases; a
    // multiplication mends that, for subnormals as well.
    const std::uint32_t wide = magnitude << (23 - M);
    const float value = as_float(wide) * power_of_two(127 - bias);
    const bool special = HasInfinity ? magnitude >= infinity : magnitude == all;
    const std::uint32_t bits = special ? wide | 0x7f800000u : as_bits(value);
    return as_float(bits | sign);
  }

  static Small encode(float value) {
    const std::uint32_t whole = as_bits(value), given = whole & 0x7fffffffu;
    // What is too large is cut to the value that follows the largest one: its code is that
    // of infinity, or of NaN.
    const std::uint32_t magnitude = given < beyond ? given : beyond;
    // Normal: round on the bits, then move the exponent to the smaller bias.
    const std::uint32_t odd = (magnitude >> drop) & 1u;
    const std::uint32_t rounded = magnitude + ((1u << (drop - 1)) - 1u) + odd;
    const std::uint32_t normal = (rounded >> drop) - rebias;
    const std::uint32_t low = as_bits(as_float(magnitude) + shift) - as_bits(shift);
    std::uint32_t found = magnitude < smallest_normal ? low : normal;
    if constexpr (HasInfinity)
      found = given > 0x7f800000u ? nan : found;
    return {static_cast<Bits>(found | ((whole >> 31) << (E + M)))};
  }
};

using Float16 = Small<std::uint16_t, 5, 10, true>;
using Float8E4M3 = Small<std::uint8_t, 4, 3, false>;
using Float8E5M2 = Small<std::uint8_t, 5, 2, true>;

// The upper half of a float32.
struct BFloat16 {
  std::uint16_t bits;

  static float decode(BFloat16 x) {
    return as_float(static_cast<std::uint32_t>(x.bits) << 16);
  }

  static BFloat16 encode(float value) {
    const std::uint32_t whole = as_bits(value);
    const std::uint32_t rounded = (whole + 0x7fffu + ((whole >> 16) & 1u)) >> 16;
    const std::uint32_t nan = ((whole >> 16) & 0x8000u) | 0x7fc0u;
    const bool is_nan = (whole & 0x7fffffffu) > 0x7f800000u;
    return {static_cast<std::uint16_t>(is_nan ? nan : rounded)};
  }
};
