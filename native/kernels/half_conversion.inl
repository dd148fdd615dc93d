// float16 in whole vectors, by the instructions that processors have for it.
//
// The bits are those of floats.inl: decoding is exact, encoding rounds to nearest, ties to
// even. A NaN would keep its payload in the instructions; so it is replaced by the one of
// floats.inl first. Included as arithmetic.inl is, after it.

#if defined(__AVX512F__)
constexpr std::size_t half_lanes = 16;
// With a mask of all: GCC 12 warns of the plain forms, without a reason.
using Halves = __m256i;
inline __m512 to_floats(Halves bits) { return _mm512_maskz_cvtph_ps(0xffff, bits); }
inline Halves to_halves(__m512 values) {
  return _mm512_maskz_cvtps_ph(0xffff, values, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__F16C__)
constexpr std::size_t half_lanes = 8;
using Halves = __m128i;
inline __m256 to_floats(Halves bits) { return _mm256_cvtph_ps(bits); }
inline Halves to_halves(__m256 values) {
  return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__aarch64__)
constexpr std::size_t half_lanes = 4;
using Halves = float16x4_t;
inline float32x4_t to_floats(Halves bits) { return vcvt_f32_f16(bits); }
inline Halves to_halves(float32x4_t values) { return vcvt_f16_f32(values); }
#else
constexpr std::size_t half_lanes = 0; // there are none
#endif

// How elements become sums and are written by whole vectors, for types that have this.
template <class Type> struct Converted {
  static constexpr bool by_vectors = false;
};

#if defined(__AVX512F__) || defined(__F16C__) || defined(__aarch64__)

template <> struct Converted<Rounded<Float16>> {
  static constexpr bool by_vectors = true;
  static constexpr std::size_t lanes = half_lanes;
  typedef float Floats __attribute__((vector_size(4 * half_lanes)));
  typedef std::int32_t Integers __attribute__((vector_size(4 * half_lanes)));

  static Floats decoded(const void *from) {
    Halves bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    return (Floats)to_floats(bits);
  }

  static void encode(void *to, Floats values) {
    const Integers whole = (Integers)values;
    const Integers nan = (whole & std::int32_t(0x80000000u)) | 0x7fc00000;
    const Integers clean = values == values ? whole : nan;
    const Halves bits = to_halves((decltype(to_floats(Halves())))clean);
    __builtin_memcpy(to, &bits, sizeof bits);
  }

  // As the operations of arithmetic.inl, on each element.
  template <class Operation> static Floats combined(Floats a, Floats b) {
    if constexpr (std::is_same_v<Operation, Sum>)
      return a + b;
    else if constexpr (std::is_same_v<Operation, Prod>)
      return a * b;
    else if constexpr (std::is_same_v<Operation, Min>)
      return ((a < b) | (a != a)) ? a : b;
    else
      return ((a > b) | (a != a)) ? a : b;
  }

  static void load(float *to, const Float16 *from, std::size_t count) {
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      const Floats values = decoded(from + i);
      __builtin_memcpy(to + i, &values, sizeof values);
    }
    for (; i < count; ++i) {
      Float16 one;
      __builtin_memcpy(&one, from + i, sizeof one);
      to[i] = Float16::decode(one);
    }
  }

  static void store(Float16 *to, const float *from, std::size_t count) {
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      Floats values;
      __builtin_memcpy(&values, from + i, sizeof values);
      encode(to + i, values);
    }
    for (; i < count; ++i) {
      const Float16 one = Float16::encode(from[i]);
      __builtin_memcpy(to + i, &one, sizeof one);
    }
  }
};

#endif
