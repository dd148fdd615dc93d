// Data that tell by themselves that they are there: every 4 bytes travel with a flag of 4
// bytes, in one word that is stored and loaded at once. A reader looks at the words until all
// of them have the flag that it expects.

#pragma once

#include "device/launch.hpp"

namespace unisono::device {

// The flag of a number, in the upper half of a word.
UNISONO_DEVICE U64 flag_of(U64 number) { return number << 32; }

// 16 bytes of data, and their flags.
template <class Target> struct Flagged {
  using Vector = typename Target::Vector;
  U64 words[flagged_words];

  UNISONO_DEVICE void set(const Vector &data, U64 flag) {
    const Parts parts = bit_cast<Parts>(data);
    UNISONO_UNROLL
    for (int k = 0; k < flagged_words; ++k)
      words[k] = flag | parts.of[k];
  }
  UNISONO_DEVICE Vector data() const {
    Parts parts;
    UNISONO_UNROLL
    for (int k = 0; k < flagged_words; ++k)
      parts.of[k] = std::uint32_t(words[k]);
    return bit_cast<Vector>(parts);
  }
  // 0 if all words have the flag.
  UNISONO_DEVICE std::uint32_t difference(U64 flag) const {
    U64 different = 0;
    UNISONO_UNROLL
    for (int k = 0; k < flagged_words; ++k)
      different |= words[k] ^ flag;
    return std::uint32_t(different >> 32);
  }

  struct Parts {
    std::uint32_t of[flagged_words];
  };
};

// A value of whole vectors.
template <class Vector, class Value> struct Vectors {
  static_assert(sizeof(Value) % sizeof(Vector) == 0);
  static constexpr int count = int(sizeof(Value) / sizeof(Vector));
  Vector of[count];
};

// What was read with flags.
template <class Value, class Target, int units>
UNISONO_DEVICE Value value_of(const Flagged<Target> (&read)[units]) {
  using Of = Vectors<typename Target::Vector, Value>;
  static_assert(Of::count == units);
  Of vectors;
  UNISONO_UNROLL
  for (int u = 0; u < units; ++u)
    vectors.of[u] = read[u].data();
  return bit_cast<Value>(vectors);
}

} // namespace unisono::device
