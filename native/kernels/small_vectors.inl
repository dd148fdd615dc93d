// Small floats as sums, converted by whole vectors.
//
// The bits are those of floats.inl. Included after half_conversion.inl.

// How elements become sums and are written by whole vectors, for types that have this.
template <class Type> struct Converted {
  static constexpr bool by_vectors = false;
};

#if defined(__AVX512F__) || defined(__F16C__) || defined(__aarch64__)

typedef float Floats __attribute__((vector_size(4 * half_lanes)));
typedef std::int32_t Integers __attribute__((vector_size(4 * half_lanes)));
typedef std::uint32_t Words __attribute__((vector_size(4 * half_lanes)));

// What the formats below have in common; each has `decoded` and `encode`.
template <class Format> struct ConvertedBy {
  static constexpr bool by_vectors = true;
  static constexpr std::size_t lanes = half_lanes;

  // As the operations of arithmetic.inl, on each element.
  template <class Operation> static Floats combined(Floats a, Floats b) {
    if constexpr (std::is_same_v<Operation, Sum>)
      return a + b;
    else
      return a * b;
  }

  static void load(float *to, const Format *from, std::size_t count) {
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      const Floats values = Converted<Rounded<Format>>::decoded(from + i);
      __builtin_memcpy(to + i, &values, sizeof values);
    }
    for (; i < count; ++i) {
      Format one;
      __builtin_memcpy(&one, from + i, sizeof one);
      to[i] = Format::decode(one);
    }
  }

  static void store(Format *to, const float *from, std::size_t count) {
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      Floats values;
      __builtin_memcpy(&values, from + i, sizeof values);
      Converted<Rounded<Format>>::encode(to + i, values);
    }
    for (; i < count; ++i) {
      const Format one = Format::encode(from[i]);
      __builtin_memcpy(to + i, &one, sizeof one);
    }
  }
};

// The instructions would keep the payload of a NaN; so it is replaced by that of floats.inl.
template <> struct Converted<Rounded<Float16>> : ConvertedBy<Float16> {
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
};

#if defined(__AVX512F__) || defined(__F16C__)

// Bytes as the low bits of halves, as words with their sign, and the low bytes of words.
#if defined(__AVX512F__)
inline Halves halves_of_bytes(const void *from) {
  __m128i bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return _mm256_cvtepu8_epi16(bytes);
}
inline Words words_of_bytes(const void *from) {
  __m128i bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return (Words)_mm512_maskz_cvtepi8_epi32(0xffff, bytes);
}
inline void put_bytes(void *to, Words x) {
  const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)x);
  __builtin_memcpy(to, &bytes, sizeof bytes);
}
#else
inline __m128i eight_bytes(const void *from) {
  long long bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return _mm_set_epi64x(0, bytes);
}
inline Halves halves_of_bytes(const void *from) { return _mm_cvtepu8_epi16(eight_bytes(from)); }
inline Words words_of_bytes(const void *from) {
  return (Words)_mm256_cvtepi8_epi32(eight_bytes(from));
}
inline void put_bytes(void *to, Words x) { // which are below 256
  const __m256i words = (__m256i)x;
  const __m128i shorts =
      _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  const __m128i bytes = _mm_packus_epi16(shorts, shorts);
  __builtin_memcpy(to, &bytes, 8);
}
#endif

typedef std::uint16_t Shorts __attribute__((vector_size(2 * half_lanes)));

// As Small::encode, on each element, by fewer instructions: the sum with a power of two that is
// as much larger as the format's mantissa is shorter leaves the rounded mantissa in the low
// bits. For subnormals it is the power for the smallest normal.
template <class Format> void encode_bytes(void *to, Floats values) {
  using F = Format;
  constexpr std::uint32_t above = std::uint32_t(F::drop) << 23;
  constexpr std::uint32_t rest = F::smallest_normal >> F::drop;
  const Words whole = (Words)values, given = whole & 0x7fffffffu;
  const Words beyond = Words{} + F::beyond, least = Words{} + F::smallest_normal;
  const Words magnitude = given < beyond ? given : beyond;
  const Words own = magnitude & 0x7f800000u;
  const Words exponent = own > least ? own : least;
  const Words power = exponent + above;
  const Words mantissa = (Words)((Floats)magnitude + (Floats)power) - power;
  Words found = (exponent >> F::drop) + mantissa - rest;
  if constexpr (F::has_infinity)
    found = values == values ? found : Words{} + F::nan;
  put_bytes(to, found | ((whole >> 24) & 0x80u));
}

// The upper half of a float16.
template <> struct Converted<Rounded<Float8E5M2>> : ConvertedBy<Float8E5M2> {
  static Floats decoded(const void *from) {
    const Shorts codes = (Shorts)halves_of_bytes(from);
    return (Floats)to_floats((Halves)(codes << 8));
  }
  static void encode(void *to, Floats values) { encode_bytes<Float8E5M2>(to, values); }
};

// As Small::decode: widened in place, then multiplied. Its only NaN is mended afterwards.
template <> struct Converted<Rounded<Float8E4M3>> : ConvertedBy<Float8E4M3> {
  static Floats decoded(const void *from) {
    const Words codes = words_of_bytes(from);
    const Words wide = (codes << Float8E4M3::drop) & 0x87f00000u;
    const Words bits = (Words)((Floats)wide * power_of_two(127 - Float8E4M3::bias));
    const Words is_nan = (Words)((codes & 0x7fu) == 0x7fu);
    return (Floats)(bits | (is_nan & 0x7fc00000u));
  }
  static void encode(void *to, Floats values) { encode_bytes<Float8E4M3>(to, values); }
};

#endif
#endif
