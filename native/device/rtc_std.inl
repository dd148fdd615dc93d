// What the sources shared with the CPU use of the standard library, for a compiler at run
// time that has none.

namespace std {

using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using size_t = decltype(sizeof(0));

template <class T, class U> inline constexpr bool is_same_v = false;
template <class T> inline constexpr bool is_same_v<T, T> = true;

template <bool, class T, class> struct conditional {
  using type = T;
};
template <class T, class U> struct conditional<false, T, U> {
  using type = U;
};
template <bool b, class T, class U> using conditional_t = typename conditional<b, T, U>::type;

template <class T, class... Us>
inline constexpr bool is_one_of = (is_same_v<T, Us> || ...);
template <class T>
inline constexpr bool is_integral_v =
    is_one_of<T, bool, char, int8_t, int16_t, int32_t, long, int64_t, uint8_t, uint16_t,
              uint32_t, unsigned long, uint64_t>;
template <class T> inline constexpr bool is_floating_point_v = is_one_of<T, float, double>;
template <class T> inline constexpr bool is_signed_v = T(-1) < T(0);

template <class T>
using make_unsigned_t = conditional_t<
    sizeof(T) == 1, uint8_t,
    conditional_t<sizeof(T) == 2, uint16_t, conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;
template <class T, class U> using common_type_t = decltype(true ? T() : U());

} // namespace std
