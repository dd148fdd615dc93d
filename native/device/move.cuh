// What an action does with bytes: copy from one source, or reduce several in their order.
//
// The threads of a block work side by side, in vectors of 16 bytes where every address
// allows it, else in elements, else byte by byte.

#pragma once

#include "device/interpret.cuh"
#include "kernels/dtypes.hpp"

namespace unisono::device {

#include "kernels/floats.inl"

#include "kernels/arithmetic.inl"

// The bits in which the addresses of a movement are not aligned to a vector.
UNISONO_DEVICE unsigned misaligned(const Movement &m) {
  U64 bits = 0;
  for (std::int32_t s = 0; s < m.num_sources; ++s)
    bits |= reinterpret_cast<U64>(m.sources[s]);
  for (std::int32_t d = 0; d < m.num_destinations; ++d)
    bits |= reinterpret_cast<U64>(m.destinations[d]);
  return unsigned(bits & 15);
}

// One thread's packs at byte `at` of the slice, and every `stride` bytes from there.
// Of so many sources at a time that as many loads are on their way as with more packs.
template <class Pack, int packs, int together>
UNISONO_DEVICE void run_packs(const Movement &m, std::int64_t at, std::int32_t stride) {
  using Unit = typename Pack::Unit;
  Pack totals[packs];
  Unit next[packs]; // as it is stored: elements of 16 bits take half the registers
  const unsigned char *first = m.sources[0] + at;
  UNISONO_UNROLL
  for (int k = 0; k < packs; ++k)
    next[k] = *reinterpret_cast<const Unit *>(first + k * stride);
  UNISONO_UNROLL
  for (int k = 0; k < packs; ++k)
    totals[k].begin(next[k]);
  std::int32_t s = 1;
  if constexpr (together > 1) {
    static_assert(packs == 1);
    UNISONO_NO_UNROLL
    for (; s + together <= m.num_sources; s += together) {
      Unit several[together];
      UNISONO_UNROLL
      for (int i = 0; i < together; ++i)
        several[i] = *reinterpret_cast<const Unit *>(m.sources[s + i] + at);
      UNISONO_UNROLL
      for (int i = 0; i < together; ++i)
        totals[0].combine(several[i]);
    }
  }
  UNISONO_NO_UNROLL
  for (; s < m.num_sources; ++s) {
    const unsigned char *source = m.sources[s] + at;
    UNISONO_UNROLL
    for (int k = 0; k < packs; ++k)
      next[k] = *reinterpret_cast<const Unit *>(source + k * stride);
    UNISONO_UNROLL
    for (int k = 0; k < packs; ++k)
      totals[k].combine(next[k]);
  }
  UNISONO_UNROLL
  for (int k = 0; k < packs; ++k)
    totals[k].finish(m.divisor);
  UNISONO_NO_UNROLL
  for (std::int32_t d = 0; d < m.num_destinations; ++d) {
    unsigned char *destination = m.destinations[d] + at;
    UNISONO_UNROLL
    for (int k = 0; k < packs; ++k)
      *reinterpret_cast<Unit *>(destination + k * stride) = totals[k].made();
  }
}

// Lets the threads of the block work on bytes [begin, end) of the piece, as far as they are in
// its tiles; they are whole packs. Each thread has several on their way at a time, while there
// are enough.
template <class Pack, int packs, class Target>
UNISONO_DEVICE void run(const Target &target, const Movement &m, std::int64_t begin,
                        std::int64_t end) {
  const std::int32_t stride = target.threads() * Pack::bytes;
  UNISONO_NO_UNROLL
  for (std::int64_t tile = m.first; tile < end; tile += m.stride) {
    const std::int64_t tile_end = tile + m.tile < end ? tile + m.tile : end;
    std::int64_t at = (tile < begin ? begin : tile) + target.thread() * Pack::bytes;
    if constexpr (packs > 1) {
      UNISONO_NO_UNROLL
      for (; at + (packs - 1) * stride < tile_end; at += packs * stride)
        run_packs<Pack, packs, 1>(m, at, stride);
    }
    UNISONO_NO_UNROLL
    for (; at < tile_end; at += stride)
      run_packs<Pack, 1, Pack::together>(m, at, stride);
  }
}

// Bytes that are copied as a Unit.
template <class Of> struct Copied {
  using Unit = Of;
  static constexpr std::int32_t bytes = sizeof(Unit);
  static constexpr int together = 1; // there is only one source
  Unit value;

  UNISONO_DEVICE void begin(const Unit &first) { value = first; }
  UNISONO_DEVICE void combine(const Unit &) {}
  UNISONO_DEVICE void finish(std::uint32_t) {}
  UNISONO_DEVICE Unit made() const { return value; }
};

// Elements of a type that are reduced by an operation, and loaded and stored as a Unit.
template <class Type, class Operation, class Of> struct Reduced {
  using Unit = Of;
  using Stored = typename Type::Stored;
  using Sum = typename Type::Sum;
  static constexpr std::int32_t bytes = sizeof(Unit);
  static constexpr int lanes = int(sizeof(Unit) / sizeof(Stored));
  // An element takes a whole register, or several.
  static constexpr int registers = lanes * int((sizeof(Sum) + 3) / 4);
  static constexpr int together = sizeof(Unit) != 16 ? 1 : registers > 8 ? 2 : 4;
  struct Elements {
    Stored of[lanes];
  };
  Sum sums[lanes];

  UNISONO_DEVICE void begin(const Unit &first) {
    const auto read = bit_cast<Elements>(first);
    UNISONO_UNROLL
    for (int i = 0; i < lanes; ++i)
      sums[i] = Type::load(read.of[i]);
  }
  UNISONO_DEVICE void combine(const Unit &next) {
    const auto read = bit_cast<Elements>(next);
    UNISONO_UNROLL
    for (int i = 0; i < lanes; ++i)
      sums[i] = Operation::of(sums[i], Type::load(read.of[i]));
  }
  UNISONO_DEVICE void finish(std::uint32_t divisor) {
    if (divisor == 1)
      return;
    UNISONO_UNROLL
    for (int i = 0; i < lanes; ++i)
      sums[i] = divided(sums[i], divisor);
  }
  UNISONO_DEVICE Unit made() const {
    Elements elements;
    UNISONO_UNROLL
    for (int i = 0; i < lanes; ++i)
      elements.of[i] = Type::store(sums[i]);
    return bit_cast<Unit>(elements);
  }
};

struct Copy {
  template <int packs, class Target>
  UNISONO_DEVICE static void move(const Target &target, const Movement &m) {
    using Vector = typename Target::Vector;
    if (m.num_destinations == 1 && m.sources[0] == m.destinations[0])
      return; // in place
    const unsigned bits = misaligned(m);
    std::int64_t done = 0;
    if (bits == 0) {
      done = m.bytes / 16 * 16;
      run<Copied<Vector>, packs>(target, m, 0, done);
    } else if (bits % 4 == 0) {
      done = m.bytes / 4 * 4;
      run<Copied<std::uint32_t>, 4>(target, m, 0, done);
    }
    run<Copied<unsigned char>, 1>(target, m, done, m.bytes);
  }
};

// An element that need not be aligned.
template <class Stored> struct Unaligned {
  unsigned char bytes[sizeof(Stored)];
};

template <class Type, class Operation> struct Reduce {
  using Stored = typename Type::Stored;
  template <class Unit> using Pack = Reduced<Type, Operation, Unit>;

  template <class Target>
  UNISONO_DEVICE static void move(const Target &target, const Movement &m) {
    using Vector = typename Target::Vector;
    if (m.num_sources == 1)
      return Copy::move<(sizeof(Stored) > 8 ? 4 : 8)>(target, m);
    // So many that their sums fit into registers.
    constexpr bool is_wide = sizeof(typename Type::Sum) > 4;
    constexpr int registers = is_wide ? 8 : Target::sum_registers;
    constexpr int packs = Pack<Vector>::registers > 8 ? 1 : registers / Pack<Vector>::registers;
    const unsigned bits = misaligned(m);
    std::int64_t done = 0;
    if (bits == 0) {
      done = m.bytes / 16 * 16;
      run<Pack<Vector>, packs>(target, m, 0, done);
    }
    if (bits % alignof(Stored) == 0)
      run<Pack<Stored>, 1>(target, m, done, m.bytes);
    else
      run<Pack<Unaligned<Stored>>, 1>(target, m, done, m.bytes);
  }
};

} // namespace unisono::device
