// Minimum and maximum of small floats on their codes, many to a vector: nothing is converted.
//
// The bits are those of decoding, comparing and encoding: zeros of both signs are equal, a NaN
// wins over any number and becomes the one NaN that floats.inl writes, with its sign. Included
// after arithmetic.inl.

#if defined(__AVX512BW__)
constexpr std::size_t vector_bytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t vector_bytes = 32;
#else
constexpr std::size_t vector_bytes = 16;
#endif

// A vector of codes, and the signed integers of their size.
template <class Bits> struct CodeVectors {
  typedef Bits Vector __attribute__((vector_size(vector_bytes)));
  typedef std::make_signed_t<Bits> Signed __attribute__((vector_size(vector_bytes)));

#if defined(__AVX512BW__) // GCC 12 takes the generic forms below apart into elements here
  using Mask = std::conditional_t<sizeof(Bits) == 1, __mmask64, __mmask32>;
  static Mask less(Vector a, Vector b) {
    if constexpr (sizeof(Bits) == 1)
      return _mm512_cmplt_epi8_mask((__m512i)a, (__m512i)b);
    else
      return _mm512_cmplt_epi16_mask((__m512i)a, (__m512i)b);
  }
  static Vector select(Mask which, Vector a, Vector b) {
    if constexpr (sizeof(Bits) == 1)
      return (Vector)_mm512_mask_blend_epi8(which, (__m512i)b, (__m512i)a);
    else
      return (Vector)_mm512_mask_blend_epi16(which, (__m512i)b, (__m512i)a);
  }
#else
  using Mask = Signed; // all bits of an element, or none
  static Mask less(Vector a, Vector b) { return (Signed)a < (Signed)b; }
  static Vector select(Mask which, Vector a, Vector b) { return which ? a : b; }
#endif
};

// The codes of special values.
template <class Format> struct CodesOf;

template <class B, unsigned All, unsigned Infinity, unsigned Nan> struct CodeTraits {
  using Bits = B;
  static constexpr Bits all = All;           // without the sign
  static constexpr Bits infinity = Infinity; // above it are the NaNs
  static constexpr Bits nan = Nan;
};
template <class Bits, int E, int M, bool HasInfinity>
struct CodesOf<Small<Bits, E, M, HasInfinity>>
    : CodeTraits<Bits, Small<Bits, E, M, HasInfinity>::all,
                 Small<Bits, E, M, HasInfinity>::largest + (HasInfinity ? 1 : 0),
                 Small<Bits, E, M, HasInfinity>::nan> {};
template <>
struct CodesOf<BFloat16> : CodeTraits<std::uint16_t, 0x7fff, 0x7f80, 0x7fc0> {};

// A vector of codes with what is needed to compare them: signed integers in their order.
template <class Format> struct OrderedCodes {
  using Codes = CodesOf<Format>;
  using Vectors = CodeVectors<typename Codes::Bits>;
  using Vector = typename Vectors::Vector;
  using Mask = typename Vectors::Mask;

  Vector codes, order;
  Mask is_nan;

  static OrderedCodes of(Vector codes) {
    const Vector magnitude = codes & Codes::all;
    const Mask negative = Vectors::less(codes, Vector{});
    return {codes, Vectors::select(negative, -magnitude, magnitude),
            Vectors::less(Vector{} + Codes::infinity, magnitude)};
  }

  // As Min and Max of arithmetic.inl, on each element.
  template <class Operation>
  static OrderedCodes combined(const OrderedCodes &a, const OrderedCodes &b) {
    const Mask before = std::is_same_v<Operation, Min> ? Vectors::less(a.order, b.order)
                                                       : Vectors::less(b.order, a.order);
    const Mask first = (before & ~b.is_nan) | a.is_nan;
    return {Vectors::select(first, a.codes, b.codes), Vectors::select(first, a.order, b.order),
            (a.is_nan & first) | (b.is_nan & ~first)};
  }

  Vector stored() const {
    const Vector sign = codes & (Vector{} + typename Codes::Bits(~Codes::all));
    return Vectors::select(is_nan, sign | Codes::nan, codes);
  }
};

// One vector of the result, whose sources `read` gives. `Fixed` of them, or as many as there are:
// the loop over two is no loop.
template <class Format, class Operation, std::size_t Fixed, class Read>
typename OrderedCodes<Format>::Vector reduced_codes(const void *const *sources,
                                                    std::size_t given, const Read &read) {
  using Ordered = OrderedCodes<Format>;
  const std::size_t num_sources = Fixed != 0 ? Fixed : given;
  Ordered result = Ordered::of(read(sources[0]));
  for (std::size_t k = 1; k < num_sources; ++k)
    result = Ordered::template combined<Operation>(result, Ordered::of(read(sources[k])));
  return result.stored();
}

template <class Format, class Operation, std::size_t Fixed>
void reduce_codes_of(void *out, const void *const *sources, std::size_t num_sources,
                     std::size_t bytes) {
  using Vector = typename OrderedCodes<Format>::Vector;
  std::size_t at = 0;
  for (; at + vector_bytes <= bytes; at += vector_bytes) {
    const Vector result = reduced_codes<Format, Operation, Fixed>(
        sources, num_sources, [&](const void *source) {
          Vector codes;
          __builtin_memcpy(&codes, static_cast<const char *>(source) + at, vector_bytes);
          return codes;
        });
    __builtin_memcpy(static_cast<char *>(out) + at, &result, vector_bytes);
  }
  if (at == bytes)
    return;
  const Vector result = reduced_codes<Format, Operation, Fixed>(
      sources, num_sources, [&](const void *source) {
        Vector codes{};
        __builtin_memcpy(&codes, static_cast<const char *>(source) + at, bytes - at);
        return codes;
      });
  __builtin_memcpy(static_cast<char *>(out) + at, &result, bytes - at);
}

// A minimum or maximum is never divided: the last argument is 1.
template <class Format, class Operation>
void reduce_codes(void *out, const void *const *sources, std::size_t num_sources,
                  std::size_t count, std::uint32_t) {
  const std::size_t bytes = count * sizeof(Format);
  if (num_sources == 2)
    reduce_codes_of<Format, Operation, 2>(out, sources, 2, bytes);
  else
    reduce_codes_of<Format, Operation, 0>(out, sources, num_sources, bytes);
}
