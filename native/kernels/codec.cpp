#include "kernels/codec.hpp"

#include <algorithm>
#include <cstring>

namespace unisono {

namespace base {
const Codec *codecs();
}

#if defined(UNISONO_X86)
namespace avx2 {
const Codec *codecs();
}
namespace avx512 {
const Codec *codecs();
}
#endif

namespace {

const Codec *table(std::string_view instruction_set) {
#if defined(UNISONO_X86)
  if (instruction_set == "avx512")
    return avx512::codecs();
  if (instruction_set == "avx2")
    return avx2::codecs();
#endif
  return instruction_set == "base" ? base::codecs() : nullptr;
}

// The tables that this machine can run, in the order of instruction_sets().
const std::vector<const Codec *> &tables() {
  static const std::vector<const Codec *> found = [] {
    std::vector<const Codec *> all;
    for (const std::string &name : instruction_sets())
      all.push_back(table(name));
    return all;
  }();
  return found;
}

const Codec &halves(DType dtype) {
  return tables()[0][dtype == DType::float16 ? 0 : 1];
}

// Elements that are widened at a time: a few kibibytes, which stay in the first-level cache.
// It is rounded to whole blocks; blocks that are larger are widened one at a time.
constexpr std::size_t kStretch = 1024;

std::size_t stretch(std::size_t block) {
  return block >= kStretch ? block : kStretch / block * block;
}

// Calls `each(begin, size, offset, floats)` with a buffer of `size` floats.
template <class Each>
void in_stretches(const Codec &codec, std::size_t count, std::size_t block, Each each) {
  const std::size_t most = stretch(block);
  alignas(64) float few[kStretch];
  std::vector<float> many(most > kStretch ? std::min(most, count) : 0);
  float *const floats = many.empty() ? few : many.data();
  for (std::size_t begin = 0; begin < count; begin += most)
    each(begin, std::min(most, count - begin), codec.bytes(block, begin), floats);
}

} // namespace

const std::vector<std::string_view> &codec_names() {
  static const std::vector<std::string_view> names = {
      "fp16", "bf16", "fp8", "fp8_e5m2", "mxfp8", "int8", "int4", "onebit"};
  return names;
}

const Codec *find_codec(std::string_view name, std::size_t instruction_set) {
  const auto &names = codec_names();
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end() || instruction_set >= tables().size())
    return nullptr;
  return tables()[instruction_set] + (found - names.begin());
}

std::uint64_t codec_key(std::uint64_t step, std::uint64_t slot) {
  std::uint64_t z = step * 0x9e3779b97f4a7c15u;
  for (int round = 0; round < 2; ++round) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z = (z ^ (z >> 31)) + (round == 0 ? slot : 0);
  }
  return z == 0 ? 1 : z;
}

void widen(float *to, const std::byte *from, DType dtype, std::size_t count) {
  if (dtype == DType::float32)
    std::memcpy(to, from, count * sizeof *to);
  else
    halves(dtype).decode(to, from, count, 1);
}

void narrow(std::byte *to, const float *from, DType dtype, std::size_t count) {
  if (dtype == DType::float32)
    std::memcpy(to, from, count * sizeof *from);
  else
    halves(dtype).encode(to, from, count, 1, 0);
}

void encode(const Codec &codec, std::byte *to, const std::byte *from, DType dtype,
            std::size_t count, std::size_t block, std::uint64_t key) {
  if (dtype == DType::float32)
    return codec.encode(to, reinterpret_cast<const float *>(from), count, block, key);
  const std::size_t size = item_size(dtype);
  in_stretches(codec, count, block, [&](auto begin, auto length, auto offset, float *floats) {
    widen(floats, from + begin * size, dtype, length);
    // Prefetch the next elements while these are encoded; a prefetch past the end is harmless.
    for (std::size_t i = 0; i < length * size; i += 64)
      __builtin_prefetch(from + (begin + length) * size + i);
    codec.encode_at(to + offset, floats, length, block, key, begin);
  });
}

void decode(const Codec &codec, std::byte *to, const std::byte *from, DType dtype,
            std::size_t count, std::size_t block) {
  if (dtype == DType::float32)
    return codec.decode(reinterpret_cast<float *>(to), from, count, block);
  const std::size_t size = item_size(dtype);
  in_stretches(codec, count, block, [&](auto begin, auto length, auto offset, float *floats) {
    codec.decode(floats, from + offset, length, block);
    narrow(to + begin * size, floats, dtype, length);
  });
}

void add(const Codec &codec, std::byte *into, const std::byte *from, DType dtype,
         std::size_t count, std::size_t block) {
  if (dtype == DType::float32)
    return codec.add(reinterpret_cast<float *>(into), from, count, block);
  const std::size_t size = item_size(dtype);
  in_stretches(codec, count, block, [&](auto begin, auto length, auto offset, float *floats) {
    widen(floats, into + begin * size, dtype, length);
    codec.add(floats, from + offset, length, block);
    narrow(into + begin * size, floats, dtype, length);
  });
}

} // namespace unisono
