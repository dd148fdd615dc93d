// float16 to float32 and back in whole vectors, by the instructions that processors have for
// it. Decoding is exact, encoding rounds to nearest, ties to even; a NaN keeps its payload.
// Included as arithmetic.inl is, after it.

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
