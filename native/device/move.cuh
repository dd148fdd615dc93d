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

template <class Unit> UNISONO_DEVICE const Unit &unit_at(const unsigned char *address) {
  UNISONO_ASSUME_GLOBAL(address);
  return *reinterpret_cast<const Unit *>(address);
}
template <class Unit> UNISONO_DEVICE Unit &unit_at(unsigned char *address) {
  UNISONO_ASSUME_GLOBAL(address);
  return *reinterpret_cast<Unit *>(address);
}

// One thread's packs at byte `at` of the piece, and every `stride` bytes from there.
template <class Pack, int packs>
UNISONO_DEVICE void run_packs(const Movement &m, std::int64_t at, std::int32_t stride) {
  using Unit = typename Pack::Unit;
  Pack totals[packs];
  Unit next[packs]; // as it is stored: elements of 16 bits take half the registers
  const unsigned char *first = m.sources[0] + at;
  UNISONO_UNROLL
  for (int k = 0; k < packs; ++k)
    next[k] = unit_at<Unit>(first + k * stride);
  UNISONO_UNROLL
  for (int k = 0; k < packs; ++k)
    totals[k].begin(next[k]);
  UNISONO_NO_UNROLL
  for (std::int32_t s = 1; s < m.num_sources; ++s) {
    const unsigned char *source = m.sources[s] + at;
    UNISONO_UNROLL
    for (int k = 0; k < packs; ++k)
      next[k] = unit_at<Unit>(source + k * stride);
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
      unit_at<Unit>(destination + k * stride) = totals[k].made();
  }
}

// Loads what one thread reads of some sources, from number `first` on. What there is not is 0:
// what is not defined would take registers.
template <class Unit, int together>
UNISONO_DEVICE void load(Unit (&several)[together], const Movement &m, std::int32_t first,
                         std::int64_t at) {
  UNISONO_UNROLL
  for (int i = 0; i < together; ++i)
    several[i] = i == 0 || first + i < m.num_sources
                     ? unit_at<Unit>(m.sources[first + i] + at)
                     : Unit{};
}

// One thread's pack at byte `at` of the piece, of so many sources at a time that as many loads
// are on their way as with several packs.
template <class Pack, class Target>
UNISONO_DEVICE void run_pack(const Movement &m, std::int64_t at) {
  constexpr int together = Pack::template together<Target>;
  typename Pack::Unit several[together];
  Pack total;
  load(several, m, 0, at);
  total.begin(several[0]);
  UNISONO_UNROLL
  for (int i = 1; i < together; ++i)
    if (i < m.num_sources)
      total.combine(several[i]);
  UNISONO_NO_UNROLL
  for (std::int32_t s = together; s < m.num_sources; s += together) {
    load(several, m, s, at);
    UNISONO_UNROLL
    for (int i = 0; i < together; ++i)
      if (i == 0 || s + i < m.num_sources)
        total.combine(several[i]);
  }
  total.finish(m.divisor);
  UNISONO_NO_UNROLL
  for (std::int32_t d = 0; d < m.num_destinations; ++d)
    unit_at<typename Pack::Unit>(m.destinations[d] + at) = total.made();
}

// Bytes of the whole packs of a piece.
template <class Pack> UNISONO_DEVICE std::int64_t whole(const Movement &m) {
  return m.bytes / Pack::bytes * Pack::bytes;
}

// Lets the threads of the block work on the whole packs of its tiles of the piece, from a byte
// on. Each thread has several on their way at a time, while there are enough.
template <class Pack, int packs, class Target>
UNISONO_DEVICE void run(const Target &target, const Movement &m, std::int64_t begin) {
  const std::int32_t stride = target.threads() * Pack::bytes;
  UNISONO_NO_UNROLL
  for (std::int64_t tile = std::int64_t(target.block()) * m.tile; tile < whole<Pack>(m);
       tile += target.blocks() * m.tile) {
    std::int64_t at = tile;
    const std::int64_t tile_end =
        at + m.tile < whole<Pack>(m) ? at + m.tile : whole<Pack>(m);
    if (at < begin)
      at = begin;
    if (at >= tile_end)
      continue; // the difference need not have 32 bits
    std::int32_t left = std::int32_t(tile_end - at) - target.thread() * Pack::bytes;
    at = tile_end - left;
    if constexpr (packs > 1) {
      UNISONO_NO_UNROLL
      for (; left > (packs - 1) * stride; at += packs * stride, left -= packs * stride)
        run_packs<Pack, packs>(m, at, stride);
    }
    UNISONO_NO_UNROLL
    for (; left > 0; at += stride, left -= stride)
      run_pack<Pack, Target>(m, at);
  }
}

// The same for a block that has one vector at most for each thread; false if it has more.
template <class Pack, class Target>
UNISONO_DEVICE bool run_small(const Target &target, const Movement &m) {
  if (m.end == 0)
    return false;
  const std::int64_t at = m.begin + target.thread() * Pack::bytes;
  if (at < m.end)
    run_pack<Pack, Target>(m, at);
  return true;
}

// Bytes that are copied as a Unit.
template <class Of> struct Copied {
  using Unit = Of;
  static constexpr std::int32_t bytes = sizeof(Unit);
  template <class> static constexpr int together = 1; // there is only one source
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
  static constexpr bool is_vector = sizeof(Unit) == 16 && alignof(Unit) > 1;
  // A sum has no more bits than an element.
  static constexpr bool is_exact = sizeof(Sum) == sizeof(Stored);
  template <class Target>
  static constexpr int together = !is_vector ? 1 : registers > 8 ? Target::narrow_sources : 4;
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
  UNISONO_DEVICE static void move(const Target &target, const Movement &m,
                                  unsigned misaligned) {
    using Vector = typename Target::Vector;
    if (m.num_destinations == 1 && m.sources[0] == m.destinations[0])
      return; // in place
    std::int64_t done = 0;
    if (misaligned == 0) {
      if (run_small<Copied<Vector>>(target, m))
        return;
      run<Copied<Vector>, packs>(target, m, 0);
      done = whole<Copied<Vector>>(m);
    } else if (misaligned % 4 == 0) {
      run<Copied<std::uint32_t>, 4>(target, m, 0);
      done = whole<Copied<std::uint32_t>>(m);
    }
    if (done < m.bytes)
      run<Copied<unsigned char>, 1>(target, m, done);
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
  UNISONO_DEVICE static void move(const Target &target, const Movement &m,
                                  unsigned misaligned) {
    using Vector = typename Target::Vector;
    if (m.num_sources == 1)
      return Copy::move<(sizeof(Stored) > 8 ? 4 : 8)>(target, m, misaligned);
    // So many that their sums fit into registers.
    constexpr bool is_wide = sizeof(typename Type::Sum) > 4;
    constexpr int registers = is_wide ? 8 : Target::sum_registers;
    constexpr int packs = Pack<Vector>::registers > 8 ? 1 : registers / Pack<Vector>::registers;
    std::int64_t done = 0;
    if (misaligned == 0) {
      if (run_small<Pack<Vector>>(target, m))
        return;
      run<Pack<Vector>, packs>(target, m, 0);
      done = whole<Pack<Vector>>(m);
    }
    if (done == m.bytes)
      return;
    if (misaligned % alignof(Stored) == 0)
      run<Pack<Stored>, 1>(target, m, done);
    else
      run<Pack<Unaligned<Stored>>, 1>(target, m, done);
  }

  template <class Packets> UNISONO_DEVICE static bool exchange(Packets &packets) {
    return packets.template exchange<Reduce>();
  }
};

} // namespace unisono::device
