// Bindings of the codecs: bytes in, bytes out, with checks of everything that could make a
// kernel access memory outside its buffers.

#include "bindings/bind.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "kernels/codec.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes =
    nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::byte *data(const Bytes &bytes) { return reinterpret_cast<std::byte *>(bytes.data()); }
const std::byte *data(const ConstBytes &bytes) {
  return reinterpret_cast<const std::byte *>(bytes.data());
}

const Codec &codec_called(const std::string &name, std::size_t block,
                          std::size_t instruction_set) {
  const Codec *codec = find_codec(name, instruction_set);
  if (codec == nullptr)
    throw nb::value_error("codec: no such codec or instruction set");
  const bool fits = codec->block == 1 ? block == 1 : block != 0 && block % 32 == 0;
  if (!fits)
    throw nb::value_error("codec: a block is a multiple of 32, and 1 where there is no scale");
  return *codec;
}

// A call whose buffers have been checked against each other.
struct Call {
  Call(const std::string &name, std::size_t raw, std::size_t coded, unsigned type,
       std::size_t block_, std::size_t instruction_set)
      : codec(codec_called(name, block_, instruction_set)), dtype(static_cast<DType>(type)),
        block(block_) {
    if (type >= static_cast<unsigned>(DType::count) || !can_widen(dtype))
      throw nb::value_error("codec: only float32, bfloat16 and float16 can be encoded");
    count = raw / item_size(dtype);
    if (raw % item_size(dtype) != 0 || coded != codec.bytes(block, count))
      throw nb::value_error("codec: the sizes of values and code do not fit");
  }

  const Codec &codec;
  DType dtype;
  std::size_t block, count;
};

void encode_bytes(const std::string &name, Bytes to, ConstBytes from, unsigned dtype,
                  std::size_t block, std::uint64_t key, std::size_t instruction_set) {
  const Call call(name, from.size(), to.size(), dtype, block, instruction_set);
  nb::gil_scoped_release unlocked;
  encode(call.codec, data(to), data(from), call.dtype, call.count, block, key);
}

void decode_bytes(const std::string &name, Bytes to, ConstBytes from, unsigned dtype,
                  std::size_t block, std::size_t instruction_set) {
  const Call call(name, to.size(), from.size(), dtype, block, instruction_set);
  nb::gil_scoped_release unlocked;
  decode(call.codec, data(to), data(from), call.dtype, call.count, block);
}

void add_bytes(const std::string &name, Bytes into, ConstBytes from, unsigned dtype,
               std::size_t block, std::size_t instruction_set) {
  const Call call(name, into.size(), from.size(), dtype, block, instruction_set);
  nb::gil_scoped_release unlocked;
  add(call.codec, data(into), data(from), call.dtype, call.count, block);
}

} // namespace

void bind_codec(nb::module_ &m) {
  m.def("codec_names", [] {
    return std::vector<std::string>(codec_names().begin(), codec_names().end());
  });
  m.def("codec_block", [](const std::string &name) {
    const Codec *codec = find_codec(name);
    if (codec == nullptr)
      throw nb::value_error("codec: no such codec");
    return codec->block;
  }, nb::arg("name"));
  m.def("codec_bytes", [](const std::string &name, std::size_t count, std::size_t block) {
    return codec_called(name, block, 0).bytes(block, count);
  }, nb::arg("name"), nb::arg("count"), nb::arg("block"));
  m.def("codec_key", &codec_key, nb::arg("step"), nb::arg("slot"));
  m.def("codec_encode", &encode_bytes, nb::arg("name"), nb::arg("to").noconvert(),
        nb::arg("source").noconvert(), nb::arg("dtype"), nb::arg("block"), nb::arg("key") = 0,
        nb::arg("instruction_set") = 0);
  m.def("codec_decode", &decode_bytes, nb::arg("name"), nb::arg("to").noconvert(),
        nb::arg("source").noconvert(), nb::arg("dtype"), nb::arg("block"),
        nb::arg("instruction_set") = 0);
  m.def("codec_add", &add_bytes, nb::arg("name"), nb::arg("into").noconvert(),
        nb::arg("source").noconvert(), nb::arg("dtype"), nb::arg("block"),
        nb::arg("instruction_set") = 0);
}
