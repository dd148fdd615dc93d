// What reductions do with one element or two: how it is read, combined, divided and written.
//
// Shared by the CPU's kernels (reduce.inl) and the interpreter for devices
// (device/interpret.cuh), so both produce the same bits. Included inside their namespaces,
// after floats.inl; a device's compiler has no standard library, so only the types and
// traits of target_cuda.inl may be used here.

template <class T> struct Is {
  using Type = T;
};

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
  template <class T> static T of(T a, T b) {
    if constexpr (std::is_same_v<T, bool>)
      return a & b;
    else
      return (a < b || a != a) ? a : b;
  }
};
struct Max {
  template <class T> static T of(T a, T b) {
    if constexpr (std::is_same_v<T, bool>)
      return a | b;
    else
      return (a > b || a != a) ? a : b;
  }
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

// Integers of 8 and 16 bits are divided in 32 bits, which take fewer registers of a device
// than 64. A divisor that is larger than all of them gives 0, as 65536 does.
template <class S> S divided(S x, std::uint32_t divisor) {
  if constexpr (std::is_same_v<S, bool>)
    return x;
  else if constexpr (is_complex<S>)
    return {divided(x.re, divisor), divided(x.im, divisor)};
  else if constexpr (std::is_floating_point_v<S>)
    return x / static_cast<S>(divisor);
  else if constexpr (sizeof(S) < 4)
    return static_cast<S>(x / static_cast<std::int32_t>(divisor < 65536 ? divisor : 65536));
  else
    return static_cast<S>(static_cast<std::conditional_t<std::is_signed_v<S>, std::int64_t,
                                                         std::uint64_t>>(x) /
                          divisor);
}

// The type of an element by its number.
template <DType> struct ElementOf;
template <> struct ElementOf<DType::bool_> : Is<Truth> {};
template <> struct ElementOf<DType::int8> : Is<Plain<std::int8_t>> {};
template <> struct ElementOf<DType::int16> : Is<Plain<std::int16_t>> {};
template <> struct ElementOf<DType::int32> : Is<Plain<std::int32_t>> {};
template <> struct ElementOf<DType::int64> : Is<Plain<std::int64_t>> {};
template <> struct ElementOf<DType::uint8> : Is<Plain<std::uint8_t>> {};
template <> struct ElementOf<DType::uint16> : Is<Plain<std::uint16_t>> {};
template <> struct ElementOf<DType::uint32> : Is<Plain<std::uint32_t>> {};
template <> struct ElementOf<DType::uint64> : Is<Plain<std::uint64_t>> {};
template <> struct ElementOf<DType::float16> : Is<Rounded<Float16>> {};
template <> struct ElementOf<DType::bfloat16> : Is<Rounded<BFloat16>> {};
template <> struct ElementOf<DType::float32> : Is<Plain<float>> {};
template <> struct ElementOf<DType::float64> : Is<Plain<double>> {};
template <> struct ElementOf<DType::complex64> : Is<Plain<Complex<float>>> {};
template <> struct ElementOf<DType::complex128> : Is<Plain<Complex<double>>> {};
template <> struct ElementOf<DType::float8_e4m3fn> : Is<Rounded<Float8E4M3>> {};
template <> struct ElementOf<DType::float8_e5m2> : Is<Rounded<Float8E5M2>> {};

// The operation by its number.
template <Op> struct OperationOf;
template <> struct OperationOf<Op::sum> : Is<Sum> {};
template <> struct OperationOf<Op::prod> : Is<Prod> {};
template <> struct OperationOf<Op::min> : Is<Min> {};
template <> struct OperationOf<Op::max> : Is<Max> {};
template <> struct OperationOf<Op::band> : Is<BAnd> {};
template <> struct OperationOf<Op::bor> : Is<BOr> {};
template <> struct OperationOf<Op::bxor> : Is<BXor> {};

// Complex numbers have no order, and only integers and truth values have bits.
template <DType D, Op O> constexpr bool has_meaning() {
  using Stored = typename ElementOf<D>::Type::Stored;
  if constexpr (is_complex<Stored>)
    return O == Op::sum || O == Op::prod;
  else if constexpr (std::is_integral_v<Stored>)
    return true;
  else
    return O != Op::band && O != Op::bor && O != Op::bxor;
}
