// The reduction kernels, written as plain loops for the compiler to vectorise. Included by
// one file per instruction set, which defines UNISONO_ISA as the name of a namespace.
//
// Everything here has internal linkage, and nothing of the standard library that could
// become a function is used: the linker keeps one copy of an inline function, and that may
// be the one compiled for instructions which this machine does not have.

#include <cstdint>
#include <type_traits>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels/reduce.hpp"

namespace unisono::UNISONO_ISA {
namespace {

#include "kernels/floats.inl"

#include "kernels/arithmetic.inl"

#include "kernels/dispatch.inl"

#include "kernels/half_conversion.inl"

#include "kernels/small_vectors.inl"

#include "kernels/small_codes.inl"

// An element wherever it lies: users' buffers need not be aligned.
template <class T> struct __attribute__((packed, may_alias)) Anywhere {
  T value;
};

// Sources are taken some at a time, for a stretch of elements whose sums stay in the
// first-level cache.
constexpr std::size_t kStretch = 1024;

// Two sources, straight into the result, which may be one of them: an element is read before
// it is written, and no other is at its place, so the loop has no dependencies.
template <class Type, class Operation>
void reduce_two(void *out, const void *one, const void *other, std::size_t count) {
  using T = Anywhere<typename Type::Stored>;
  const T *a = static_cast<const T *>(one), *b = static_cast<const T *>(other);
  T *result = static_cast<T *>(out);
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i)
    result[i].value =
        Type::store(Operation::of(Type::load(a[i].value), Type::load(b[i].value)));
}

template <class Type, class Operation>
void reduce(void *out, const void *const *sources, std::size_t num_sources,
            std::size_t count, std::uint32_t divisor) {
  using T = Anywhere<typename Type::Stored>;
  using S = typename Type::Sum;
  if (num_sources == 2 && divisor == 1)
    return reduce_two<Type, Operation>(out, sources[0], sources[1], count);
  alignas(64) S sums[kStretch];
  for (std::size_t begin = 0; begin < count; begin += kStretch) {
    const std::size_t length = count - begin < kStretch ? count - begin : kStretch;
    const auto at = [&](std::size_t k) { return static_cast<const T *>(sources[k]) + begin; };
    const T *first = at(0);
    std::size_t k = 1;
    if (num_sources >= 2) {
      const T *second = at(k++);
      for (std::size_t i = 0; i < length; ++i)
        sums[i] = Operation::of(Type::load(first[i].value), Type::load(second[i].value));
    } else {
      for (std::size_t i = 0; i < length; ++i)
        sums[i] = Type::load(first[i].value);
    }
    for (; k + 1 < num_sources; k += 2) {
      const T *a = at(k), *b = at(k + 1);
      for (std::size_t i = 0; i < length; ++i)
        sums[i] = Operation::of(Operation::of(sums[i], Type::load(a[i].value)),
                                Type::load(b[i].value));
    }
    if (k < num_sources) {
      const T *a = at(k);
      for (std::size_t i = 0; i < length; ++i)
        sums[i] = Operation::of(sums[i], Type::load(a[i].value));
    }
    if (divisor != 1)
      for (std::size_t i = 0; i < length; ++i)
        sums[i] = divided(sums[i], divisor);
    T *result = static_cast<T *>(out) + begin;
    for (std::size_t i = 0; i < length; ++i)
      result[i].value = Type::store(sums[i]);
  }
}

// The same where elements are converted by whole vectors. Few sources are read side by side,
// and their sums stay in registers; of many, each becomes floats first, which stay in the
// first-level cache.
constexpr std::size_t kSideBySide = 8;

template <class Type, class Operation>
void reduce_by_stretches(void *out, const void *const *sources, std::size_t num_sources,
                         std::size_t begin, std::size_t count, std::uint32_t divisor) {
  using T = typename Type::Stored;
  alignas(64) float sums[kStretch];
  alignas(64) float next[kStretch];
  for (; begin < count; begin += kStretch) {
    const std::size_t length = count - begin < kStretch ? count - begin : kStretch;
    Converted<Type>::load(sums, static_cast<const T *>(sources[0]) + begin, length);
    for (std::size_t k = 1; k < num_sources; ++k) {
      Converted<Type>::load(next, static_cast<const T *>(sources[k]) + begin, length);
      for (std::size_t i = 0; i < length; ++i)
        sums[i] = Operation::of(sums[i], next[i]);
    }
    if (divisor != 1)
      for (std::size_t i = 0; i < length; ++i)
        sums[i] = divided(sums[i], divisor);
    Converted<Type>::store(static_cast<T *>(out) + begin, sums, length);
  }
}

// `Fixed` sources, or as many as there are: the loop over two is no loop.
template <class Type, class Operation, std::size_t Fixed = 0>
std::size_t reduce_side_by_side(void *out, const void *const *sources, std::size_t given,
                                std::size_t count, std::uint32_t divisor) {
  using T = typename Type::Stored;
  using Vectors = Converted<Type>;
  const std::size_t num_sources = Fixed != 0 ? Fixed : given;
  std::size_t i = 0;
  for (; i + Vectors::lanes <= count; i += Vectors::lanes) {
    auto sums = Vectors::decoded(static_cast<const T *>(sources[0]) + i);
    for (std::size_t k = 1; k < num_sources; ++k)
      sums = Vectors::template combined<Operation>(
          sums, Vectors::decoded(static_cast<const T *>(sources[k]) + i));
    if (divisor != 1)
      sums = sums / static_cast<float>(divisor);
    Vectors::encode(static_cast<T *>(out) + i, sums);
  }
  return i;
}

template <class Type, class Operation>
void reduce_converted(void *out, const void *const *sources, std::size_t num_sources,
                      std::size_t count, std::uint32_t divisor) {
  std::size_t done = 0;
  if (num_sources == 2)
    done = reduce_side_by_side<Type, Operation, 2>(out, sources, 2, count, divisor);
  else if (num_sources <= kSideBySide)
    done = reduce_side_by_side<Type, Operation>(out, sources, num_sources, count, divisor);
  reduce_by_stretches<Type, Operation>(out, sources, num_sources, done, count, divisor);
}

template <class Type> constexpr bool is_small = false;
template <class Format> constexpr bool is_small<Rounded<Format>> = true;

struct Kernels {
  template <DType D, Op O> static Kernel of() {
    if constexpr (!has_meaning<D, O>())
      return nullptr;
    else if constexpr (is_small<typename ElementOf<D>::Type> && (O == Op::min || O == Op::max))
      return reduce_codes<typename ElementOf<D>::Type::Stored, typename OperationOf<O>::Type>;
    else if constexpr (Converted<typename ElementOf<D>::Type>::by_vectors)
      return reduce_converted<typename ElementOf<D>::Type, typename OperationOf<O>::Type>;
    else
      return reduce<typename ElementOf<D>::Type, typename OperationOf<O>::Type>;
  }
};

} // namespace

Kernel find(DType dtype, Op op) { return by_dtype<Kernels>(dtype, op); }

} // namespace unisono::UNISONO_ISA
