// The kernels of the codecs, written as plain loops for the compiler to vectorise. Included
// by one file per instruction set, which defines UNISONO_ISA as the name of a namespace; see
// reduce.inl for why everything has internal linkage and nothing of the library is used.

#include <cstddef>
#include <cstdint>

#include "kernels/codec.hpp"

namespace unisono::UNISONO_ISA {
namespace {

#include "kernels/codec_formats.inl"

// Blocks --------------------------------------------------------------------------------
//
// Each class has the number of bytes of `count` elements of a block, and encodes and decodes
// a block; `take(i, value)` receives the decoded values.

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
  static void stochastic(std::byte *to, const Float *from, Size count, U64 key, U64 group) {
    auto *out = reinterpret_cast<Stored *>(to);
    with_random_bits(count, key, group, [=](std::size_t begin, auto size, const RandomBits &random) {
      const std::size_t end = size;
      UNISONO_APART
      for (std::size_t i = 0; i < end; ++i)
        out[begin + i].value = Format::stochastic(from[begin + i].value, random.of[i]);
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

// A code of one byte for each element, after a scale. Codes converts values to codes.
template <class Codes, class Scaling, std::size_t Usual> struct Scaled {
  using Stored = Anywhere<std::uint8_t>;
  static constexpr std::size_t usual = Usual;

  static std::size_t bytes(std::size_t count) { return Scaling::bytes + count; }

  // The scale of a block that may have NaN and infinities; an inverse of 0 means NaN.
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
  static void stochastic(std::byte *to, const Float *from, Size count, U64 key, U64 group) {
    const Scale scale = begin(to, from, count, absmax(from, count));
    if (scale.inverse == 0.0f)
      return clear(to + Scaling::bytes, count);
    auto *out = reinterpret_cast<Stored *>(to + Scaling::bytes);
    with_random_bits(count, key, group, [=](std::size_t begin, auto size, const RandomBits &random) {
      const std::size_t end = size;
      UNISONO_APART
      for (std::size_t i = 0; i < end; ++i)
        out[begin + i].value =
            Codes::stochastic(from[begin + i].value * scale.inverse, random.of[i]);
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

// Integers have no NaN: a block with a NaN or an infinity has the scale NaN and the codes 0,
// so all its elements decode to NaN.
struct Bytes {
  static constexpr bool has_nan = false;
  static std::uint8_t nearest_within(float x) {
    return static_cast<std::uint8_t>(Whole<127>::nearest(x));
  }
  static std::uint8_t nearest(float x) { return nearest_within(x); }
  static std::uint8_t stochastic(float x, U32 random) {
    return static_cast<std::uint8_t>(Whole<127>::stochastic(x, random));
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
  static void stochastic(std::byte *to, const Float *from, Size count, U64 key, U64 group) {
    const Scale scale = scale_or_nan<Scaling>(from, count);
    Scaling::put(to, scale.value);
    if (scale.value != scale.value)
      return clear(to + Scaling::bytes, (count + 1) / 2);
    auto *out = reinterpret_cast<Stored *>(to + Scaling::bytes);
    const std::size_t half = (count + 1) / 2;
    // One element at a time, so the two halves of a byte are not computed together.
    with_random_bits(count, key, group, [=](std::size_t begin, auto size, const RandomBits &random) {
      std::uint8_t codes[kRun];
      const std::size_t end = size;
      UNISONO_APART
      for (std::size_t i = 0; i < end; ++i)
        codes[i] = static_cast<std::uint8_t>(
            Whole<7>::stochastic(from[begin + i].value * scale.inverse, random.of[i]));
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

// A table, since not every instruction set can shift each lane by a different number.
struct Powers {
  U32 of[32];
  constexpr Powers() : of() {
    for (U32 i = 0; i < 32; ++i)
      of[i] = 1u << i;
  }
};
constexpr Powers kPowers;

// One sign bit per element, and the mean magnitude of the block as scale, which minimises
// the error.
struct OneBit {
  using Stored = Anywhere<std::uint8_t>;
  static constexpr std::size_t usual = 128;

  static std::size_t bytes(std::size_t count) { return 4 + (count + 7) / 8; }

  // Sixteen partial sums, added in halves: one order of summation for every vector width.
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

  // Signs are not rounded, so stochastic rounding is the same as rounding to nearest.
  static void stochastic(std::byte *to, const Float *from, std::size_t count, U64, U64) {
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

// Calls `each(begin, size, offset)` for all blocks. Blocks of the default size have a constant
// size, which the compiler can unroll. Codecs without a scale are processed in runs.
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

// Prefetches the data of later blocks, since a block takes so long that the hardware does
// not prefetch that far ahead. The address may be past the end: a prefetch does not fault.
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
      Block::stochastic(to + offset, in + begin, size, key, (first + begin) / kGroup);
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
