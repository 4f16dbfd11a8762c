// metal_type_traits, metal_limits and metal_array: the parts of C++ that Metal takes under its own
// name, corrected where C++ does not know half and bfloat; the constants that are macros in Metal.
#pragma once

#include <limits>

#include "metal_sim/shim/msl_vector.h"

namespace metal_sim {

/// numeric_limits of a type that C++ has none for, by its digits and exponents.
template <typename T, int kDigits, int kMaximumExponent>
struct FloatLimits {
  static constexpr bool is_specialized = true;
  static constexpr bool is_signed = true;
  static constexpr bool is_integer = false;
  static constexpr bool is_exact = false;
  static constexpr bool has_infinity = true;
  static constexpr bool has_quiet_NaN = true;
  static constexpr int radix = 2;
  static constexpr int digits = kDigits;
  static constexpr int digits10 = (kDigits - 1) * 30103 / 100000;
  static constexpr int max_digits10 = kDigits * 30103 / 100000 + 2;
  static constexpr int max_exponent = kMaximumExponent;
  static constexpr int min_exponent = 3 - kMaximumExponent;

  static constexpr T epsilon() { return Power(1 - digits); }
  static constexpr T min() { return Power(min_exponent - 1); }
  static constexpr T denorm_min() { return Power(min_exponent - digits); }
  static constexpr T max() { return Power(max_exponent - 1) * (T(2) - epsilon()); }
  static constexpr T lowest() { return -max(); }
  static constexpr T round_error() { return T(0.5f); }
  static constexpr T infinity() { return static_cast<T>(__builtin_inff()); }
  static constexpr T quiet_NaN() { return static_cast<T>(__builtin_nanf("")); }

 private:
  static constexpr T Power(int exponent) {
    T result = 1;
    for (int i = 0; i < exponent; ++i) result *= T(2);
    for (int i = 0; i > exponent; --i) result /= T(2);
    return result;
  }
};

}  // namespace metal_sim

namespace metal_sim_program::metal {

template <typename T>
struct numeric_limits : std::numeric_limits<T> {};
template <>
struct numeric_limits<half> : metal_sim::FloatLimits<half, 11, 16> {};
template <>
struct numeric_limits<bfloat> : metal_sim::FloatLimits<bfloat, 8, 128> {};

using std::add_const;
using std::add_const_t;
using std::bool_constant;
using std::common_type_t;
using std::conditional;
using std::conditional_t;
using std::decay;
using std::decay_t;
using std::enable_if;
using std::enable_if_t;
using std::extent_v;
using std::false_type;
using std::integral_constant;
using std::is_array_v;
using std::is_const_v;
using std::is_convertible;
using std::is_convertible_v;
using std::is_enum_v;
using std::is_integral;
using std::is_integral_v;
using std::is_pointer;
using std::is_pointer_v;
using std::is_reference_v;
using std::is_same;
using std::is_same_v;
using std::is_unsigned;
using std::is_unsigned_v;
using std::is_void_v;
using std::make_signed;
using std::make_signed_t;
using std::make_unsigned;
using std::make_unsigned_t;
using std::remove_const;
using std::remove_const_t;
using std::remove_cv;
using std::remove_cv_t;
using std::remove_pointer_t;
using std::remove_reference;
using std::remove_reference_t;
using std::true_type;
using std::underlying_type_t;

/// Types have no address spaces here.
template <typename T>
using remove_addrspace_t = T;
template <typename T>
using remove_addrspace = std::type_identity<T>;

// Apple's own names of these, which programs use.
template <typename... Conditions>
using _conjunction = std::conjunction<Conditions...>;
template <typename... Conditions>
using _disjunction = std::disjunction<Conditions...>;
template <typename Condition>
using _negation = std::negation<Condition>;

template <typename T>
struct is_floating_point : bool_constant<metal_sim::FloatScalar<remove_cv_t<T>>> {};
template <typename T>
inline constexpr bool is_floating_point_v = is_floating_point<T>::value;

template <typename T>
struct is_arithmetic : bool_constant<is_floating_point_v<T> || is_integral_v<T>> {};
template <typename T>
inline constexpr bool is_arithmetic_v = is_arithmetic<T>::value;

template <typename T>
struct is_signed : bool_constant<is_floating_point_v<T> || std::is_signed_v<T>> {};
template <typename T>
inline constexpr bool is_signed_v = is_signed<T>::value;

template <typename T>
struct is_scalar : bool_constant<is_arithmetic_v<T> || std::is_scalar_v<T>> {};
template <typename T>
inline constexpr bool is_scalar_v = is_scalar<T>::value;

/// The scalar that a vector is made of, or the type itself.
template <typename T>
struct make_scalar {
  using type = metal_sim::Element<T>;
};
template <typename T>
using make_scalar_t = typename make_scalar<T>::type;

template <typename T>
constexpr remove_reference_t<T>&& move(T&& value) noexcept {
  return static_cast<remove_reference_t<T>&&>(value);
}
template <typename T>
METAL_SIM_INLINE constexpr void swap(T& left, T& right) {
  const T kept = left;
  left = right;
  right = kept;
}

template <typename T, size_t N>
struct array {
  T elements[N];

  METAL_SIM_INLINE constexpr T& operator[](size_t index) { return elements[index]; }
  METAL_SIM_INLINE constexpr const T& operator[](size_t index) const { return elements[index]; }
  METAL_SIM_INLINE constexpr size_t size() const { return N; }
  METAL_SIM_INLINE constexpr bool empty() const { return N == 0; }
  METAL_SIM_INLINE constexpr T* data() { return elements; }
  METAL_SIM_INLINE constexpr const T* data() const { return elements; }
  METAL_SIM_INLINE constexpr T* begin() { return elements; }
  METAL_SIM_INLINE constexpr const T* begin() const { return elements; }
  METAL_SIM_INLINE constexpr T* end() { return elements + N; }
  METAL_SIM_INLINE constexpr const T* end() const { return elements + N; }
};

}  // namespace metal_sim_program::metal

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define HUGE_VALH metal::numeric_limits<half>::infinity()
#define MAXFLOAT __FLT_MAX__
#define MAXHALF metal::numeric_limits<half>::max()

#define FLT_DIG __FLT_DIG__
#define FLT_MANT_DIG __FLT_MANT_DIG__
#define FLT_MAX_EXP __FLT_MAX_EXP__
#define FLT_MIN_EXP __FLT_MIN_EXP__
#define FLT_RADIX 2
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_DIG 3
#define HALF_MANT_DIG 11
#define HALF_MAX_EXP 16
#define HALF_MIN_EXP (-13)
#define HALF_RADIX 2
#define HALF_MAX metal::numeric_limits<half>::max()
#define HALF_MIN metal::numeric_limits<half>::min()
#define HALF_EPSILON metal::numeric_limits<half>::epsilon()
#define BFLT_MAX metal::numeric_limits<bfloat>::max()
#define BFLT_MIN metal::numeric_limits<bfloat>::min()
#define BFLT_EPSILON metal::numeric_limits<bfloat>::epsilon()

#define CHAR_BIT 8
#define SCHAR_MIN (-128)
#define SCHAR_MAX 127
#define UCHAR_MAX 255
#define CHAR_MIN SCHAR_MIN
#define CHAR_MAX SCHAR_MAX
#define SHRT_MIN (-32767 - 1)
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define INT_MIN (-2147483647 - 1)
#define INT_MAX 2147483647
#define UINT_MAX 4294967295u
#define LONG_MIN (-9223372036854775807l - 1)
#define LONG_MAX 9223372036854775807l
#define ULONG_MAX 18446744073709551615ul

#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.434294481903251827651f
#define M_LN2_F 0.693147180559945309417f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.785398163397448309616f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_PI_F 0.636619772367581343076f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f
#define M_E_H 2.71828182845904523536h
#define M_LOG2E_H 1.44269504088896340736h
#define M_LOG10E_H 0.434294481903251827651h
#define M_LN2_H 0.693147180559945309417h
#define M_LN10_H 2.30258509299404568402h
#define M_PI_H 3.14159265358979323846h
#define M_PI_2_H 1.57079632679489661923h
#define M_PI_4_H 0.785398163397448309616h
#define M_1_PI_H 0.318309886183790671538h
#define M_2_PI_H 0.636619772367581343076h
#define M_2_SQRTPI_H 1.12837916709551257390h
#define M_SQRT2_H 1.41421356237309504880h
#define M_SQRT1_2_H 0.707106781186547524401h
