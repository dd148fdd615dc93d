// Element types and operations, numbered as in src/unisono/dtypes.py. A device's compiler
// reads this file too, without the standard library.

#pragma once

#ifndef UNISONO_RTC
#include <cstddef>
#include <cstdint>
#endif

namespace unisono {

enum class DType : std::uint8_t {
  bool_, int8, int16, int32, int64, uint8, uint16, uint32, uint64,
  float16, bfloat16, float32, float64, complex64, complex128,
  float8_e4m3fn, float8_e5m2, count
};

enum class Op : std::uint8_t { sum, prod, min, max, band, bor, bxor, count };

constexpr std::size_t item_size(DType dtype) {
  constexpr std::size_t sizes[] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 1, 1};
  return sizes[static_cast<std::size_t>(dtype)];
}

} // namespace unisono
