// Codecs: float32s as fewer bytes, in blocks of elements that share a scale.
//
// A code is a row of blocks: the scale, then the codes of the block's elements. All blocks
// but the last have one size, so any run of whole blocks can be encoded or decoded alone.
// What each codec does to a value, NaN and infinities included, is in docs/codecs.md and is
// defined by src/unisono/codecs/reference.py, which the kernels equal bit for bit. They are
// in codec.inl, compiled once for each instruction set, as reductions are (reduce.inl).

#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/reduce.hpp"

namespace unisono {

// Buffers may have any alignment, but must not overlap. `block` is a multiple of 32 (1 for
// codecs without a scale); the default is the member below. `key` 0 rounds to nearest; any
// other key rounds stochastically to one of the two neighbours, by random bits that depend
// on the key and the index of the element alone.
struct Codec {
  std::size_t block; // elements that share a scale
  std::size_t (*bytes)(std::size_t block, std::size_t count);
  void (*encode)(std::byte *to, const float *from, std::size_t count, std::size_t block,
                 std::uint64_t key);
  void (*decode)(float *to, const std::byte *from, std::size_t count, std::size_t block);
  void (*add)(float *into, const std::byte *from, std::size_t count, std::size_t block);
  // Encodes a part of a larger buffer, which begins at its element `first`, a multiple of 32.
  void (*encode_at)(std::byte *to, const float *from, std::size_t count, std::size_t block,
                    std::uint64_t key, std::uint64_t first);
};

// The names of all codecs, in the order of the tables in codec.inl.
const std::vector<std::string_view> &codec_names();

// The codec of that name, for one of instruction_sets(); null if there is none.
const Codec *find_codec(std::string_view name, std::size_t instruction_set = 0);

// The key of stochastic rounding for one buffer in one step of training; never 0.
std::uint64_t codec_key(std::uint64_t step, std::uint64_t slot);

// Converts float16 and bfloat16 to float32, and back, rounded to nearest; copies float32.
// No other type can be widened.
constexpr bool can_widen(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32;
}
void widen(float *to, const std::byte *from, DType dtype, std::size_t count);
void narrow(std::byte *to, const float *from, DType dtype, std::size_t count);

// The same three for elements of any type that can be widened; added up in float32.
void encode(const Codec &codec, std::byte *to, const std::byte *from, DType dtype,
            std::size_t count, std::size_t block, std::uint64_t key);
void decode(const Codec &codec, std::byte *to, const std::byte *from, DType dtype,
            std::size_t count, std::size_t block);
void add(const Codec &codec, std::byte *into, const std::byte *from, DType dtype,
         std::size_t count, std::size_t block);

} // namespace unisono
