// The reduction kernels, written as plain loops for the compiler to vectorise. Included by
// one file per instruction set, which defines UNISONO_ISA as the name of a namespace.
//
// Everything here has internal linkage, and nothing of the standard library that could
// become a function is used: the linker keeps one copy of an inline function, and that may
// be the one compiled for instructions which this machine does not have.

#include <cstdint>
#include <type_traits>

#include "kernels/reduce.hpp"

namespace unisono::UNISONO_ISA {
namespace {

#include "kernels/floats.inl"

template <class T> struct Complex {
  T re, im;
};

// How an element is read, added up and written; most types are their own sums.
template <class T> struct Plain {
  using Stored = T;
  using Sum = T;
  static Sum load(T x) { return x; }
  static T store(Sum x) { return x; }
};

template <class T> struct Rounded {
  using Stored = T;
  using Sum = float;
  static Sum load(T x) { return T::decode(x); }
  static T store(Sum x) { return T::encode(x); }
};

// NumPy stores false and true as bytes 0 and 1; anything else counts as true.
struct Truth {
  using Stored = std::uint8_t;
  using Sum = bool;
  static Sum load(std::uint8_t x) { return x != 0; }
  static std::uint8_t store(bool x) { return x; }
};

template <class T> constexpr bool is_complex = false;
template <class T> constexpr bool is_complex<Complex<T>> = true;

// Signed overflow wraps, as everywhere in numerical Python.
template <class T, class F> T wrapping(T a, T b, F f) {
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    using U = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
    return static_cast<T>(f(static_cast<U>(a), static_cast<U>(b)));
  } else {
    return f(a, b);
  }
}

struct Sum {
  template <class T> static T of(T a, T b) {
    if constexpr (std::is_same_v<T, bool>)
      return a | b;
    else if constexpr (is_complex<T>)
      return {a.re + b.re, a.im + b.im};
    else
      return wrapping(a, b, [](auto x, auto y) { return x + y; });
  }
};

struct Prod {
  template <class T> static T of(T a, T b) {
    if constexpr (std::is_same_v<T, bool>)
      return a & b;
    else if constexpr (is_complex<T>)
      return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    else
      return wrapping(a, b, [](auto x, auto y) { return x * y; });
  }
};

// In min and max a NaN wins over any number.
struct Min {
  template <class T> static T of(T a, T b) { return (a < b || a != a) ? a : b; }
};
struct Max {
  template <class T> static T of(T a, T b) { return (a > b || a != a) ? a : b; }
};
struct BAnd {
  template <class T> static T of(T a, T b) { return static_cast<T>(a & b); }
};
struct BOr {
  template <class T> static T of(T a, T b) { return static_cast<T>(a | b); }
};
struct BXor {
  template <class T> static T of(T a, T b) { return static_cast<T>(a ^ b); }
};

template <class S> S divided(S x, std::uint32_t divisor) {
  if constexpr (std::is_same_v<S, bool>)
    return x;
  else if constexpr (is_complex<S>)
    return {divided(x.re, divisor), divided(x.im, divisor)};
  else if constexpr (std::is_floating_point_v<S>)
    return x / static_cast<S>(divisor);
  else
    return static_cast<S>(static_cast<std::conditional_t<std::is_signed_v<S>, std::int64_t,
                                                         std::uint64_t>>(x) /
                          divisor);
}

// An element wherever it lies: users' buffers need not be aligned.
template <class T> struct __attribute__((packed, may_alias)) Anywhere {
  T value;
};

// Sources are taken some at a time, for a stretch of elements whose sums stay in the
// first-level cache.
constexpr std::size_t kStretch = 1024;

template <class Type, class Operation>
void reduce(void *out, const void *const *sources, std::size_t num_sources,
            std::size_t count, std::uint32_t divisor) {
  using T = Anywhere<typename Type::Stored>;
  using S = typename Type::Sum;
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

template <class Type> Kernel ordered(Op op) {
  switch (op) {
  case Op::sum: return reduce<Type, Sum>;
  case Op::prod: return reduce<Type, Prod>;
  case Op::min: return reduce<Type, Min>;
  case Op::max: return reduce<Type, Max>;
  default: return nullptr;
  }
}

template <class Type> Kernel bitwise(Op op) {
  switch (op) {
  case Op::band: return reduce<Type, BAnd>;
  case Op::bor: return reduce<Type, BOr>;
  case Op::bxor: return reduce<Type, BXor>;
  default: return ordered<Type>(op);
  }
}

template <class T> Kernel unordered(Op op) { // complex numbers have no order
  switch (op) {
  case Op::sum: return reduce<Plain<T>, Sum>;
  case Op::prod: return reduce<Plain<T>, Prod>;
  default: return nullptr;
  }
}

} // namespace

Kernel find(DType dtype, Op op) {
  switch (dtype) {
  case DType::bool_: return bitwise<Truth>(op);
  case DType::int8: return bitwise<Plain<std::int8_t>>(op);
  case DType::int16: return bitwise<Plain<std::int16_t>>(op);
  case DType::int32: return bitwise<Plain<std::int32_t>>(op);
  case DType::int64: return bitwise<Plain<std::int64_t>>(op);
  case DType::uint8: return bitwise<Plain<std::uint8_t>>(op);
  case DType::uint16: return bitwise<Plain<std::uint16_t>>(op);
  case DType::uint32: return bitwise<Plain<std::uint32_t>>(op);
  case DType::uint64: return bitwise<Plain<std::uint64_t>>(op);
  case DType::float16: return ordered<Rounded<Float16>>(op);
  case DType::bfloat16: return ordered<Rounded<BFloat16>>(op);
  case DType::float32: return ordered<Plain<float>>(op);
  case DType::float64: return ordered<Plain<double>>(op);
  case DType::complex64: return unordered<Complex<float>>(op);
  case DType::complex128: return unordered<Complex<double>>(op);
  case DType::float8_e4m3fn: return ordered<Rounded<Float8E4M3>>(op);
  case DType::float8_e5m2: return ordered<Rounded<Float8E5M2>>(op);
  default: return nullptr;
  }
}

} // namespace unisono::UNISONO_ISA
