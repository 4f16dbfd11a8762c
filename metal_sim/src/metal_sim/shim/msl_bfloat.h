// bfloat: the upper half of a float. Every operation is computed in float, which holds enough for
// it, and rounded to nearest even.
//
// A class, because clang's own type mixes with half without a word and cannot be cast to it. Like
// in Metal, operators with float yield float, those with integers bfloat, those with half do not
// compile, and it becomes a float or an integer without a cast. A class cannot be one side of ?:
// whose other side is a float; the rewriter makes a 0 there kZero.
#pragma once

#include <concepts>
#include <type_traits>

#include "metal_sim/shim/msl_runtime.h"

using half = _Float16;

namespace metal_sim {

/// The scalars of C++ and half.
template <typename T>
concept BuiltInScalar = std::is_arithmetic_v<T> || std::is_same_v<T, half>;

METAL_SIM_INLINE constexpr uint16_t BfloatBits(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = is_nan ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(rounded >> 16);
}

/// The float next to `value` that keeps, in its last bit, that it is not exact (rounding to odd): a
/// rounding to fewer bits then comes out as if there had been one.
template <BuiltInScalar T>
METAL_SIM_INLINE constexpr float RoundedToOdd(T value) {
  const float nearest = static_cast<float>(value);
  if constexpr (sizeof(T) >= 4 && !std::is_same_v<T, float>) {
    using Exact = std::conditional_t<std::is_integral_v<T>, __int128, T>;
    const uint32_t bits = __builtin_bit_cast(uint32_t, nearest);
    // Infinity and NaN stay unchanged.
    if ((bits & 0x7f800000u) == 0x7f800000u) return nearest;
    const auto exact = static_cast<Exact>(value);
    const auto back = static_cast<Exact>(nearest);
    if (exact != back && (bits & 1) == 0) {
      return __builtin_bit_cast(float, (back < exact) == (exact > 0) ? bits + 1 : bits - 1);
    }
  }
  return nearest;
}

}  // namespace metal_sim

struct bfloat {
  bfloat() = default;

  template <metal_sim::BuiltInScalar T>
  METAL_SIM_INLINE constexpr explicit(std::is_same_v<T, half>) bfloat(T value)
      : bits_(metal_sim::BfloatBits(metal_sim::RoundedToOdd(value))) {}

  /// From a class that converts to a number.
  template <typename T>
  requires(std::is_class_v<T>&& std::is_convertible_v<const T&, float>) METAL_SIM_INLINE
      constexpr explicit bfloat(const T& value)
      : bfloat(static_cast<float>(value)) {}

  // Templates, so that each conversion is to the type asked for.
  template <std::same_as<float> T>
  METAL_SIM_INLINE constexpr operator T() const {
    return __builtin_bit_cast(float, static_cast<uint32_t>(bits_) << 16);
  }
  template <metal_sim::BuiltInScalar T>
  requires(!std::is_same_v<T, float>) METAL_SIM_INLINE constexpr explicit(!std::is_integral_v<T>)
  operator T() const {
    return static_cast<T>(static_cast<float>(*this));
  }

  METAL_SIM_INLINE constexpr bfloat operator-() const {
    return __builtin_bit_cast(bfloat, static_cast<uint16_t>(bits_ ^ 0x8000u));
  }
  METAL_SIM_INLINE constexpr bfloat operator+() const { return *this; }

 private:
  uint16_t bits_;
};

namespace metal_sim {

template <typename A, typename B>
concept WithBfloat = (std::is_same_v<A, bfloat> &&
                      (std::is_same_v<B, bfloat> || BuiltInScalar<B>)) ||
                     (std::is_same_v<B, bfloat> && BuiltInScalar<A>);

/// An operand of a bfloat: integers become bfloat first.
template <typename T>
METAL_SIM_INLINE constexpr float BfloatOperand(T value) {
  static_assert(!std::is_same_v<T, half>, "half and bfloat do not mix: convert one of them");
  if constexpr (std::is_integral_v<T>) {
    return bfloat(value);
  } else {
    return value;
  }
}

template <typename A, typename B>
using BfloatResult =
    std::conditional_t<std::is_same_v<A, float> || std::is_same_v<B, float>, float, bfloat>;

/// A literal 0 at one side of ?:. If the other side is of a class, as bfloat is, so is the result;
/// if it is a number, 0 is an int: templates convert to exactly their type, and to no other.
struct Zero {
  template <typename T>
  requires(std::is_class_v<T> || std::is_pointer_v<T> || std::is_same_v<T, int> ||
           std::is_same_v<T, half>) METAL_SIM_INLINE constexpr
  operator T() const {
    return T(0);
  }
};
inline constexpr Zero kZero;

}  // namespace metal_sim

#define METAL_SIM_BFLOAT_COMPARISON(OPERATOR)                                             \
  template <typename A, typename B>                                                       \
  requires metal_sim::WithBfloat<A, B> METAL_SIM_INLINE constexpr bool operator OPERATOR( \
      A left, B right) {                                                                  \
    return metal_sim::BfloatOperand(left) OPERATOR metal_sim::BfloatOperand(right);       \
  }
#define METAL_SIM_BFLOAT_ARITHMETIC(OPERATOR)                                                   \
  template <typename A, typename B>                                                             \
  requires metal_sim::WithBfloat<A, B> METAL_SIM_INLINE constexpr metal_sim::BfloatResult<A, B> \
  operator OPERATOR(A left, B right) {                                                          \
    return metal_sim::BfloatOperand(left) OPERATOR metal_sim::BfloatOperand(right);             \
  }                                                                                             \
  template <typename B>                                                                         \
  requires metal_sim::WithBfloat<bfloat, B> METAL_SIM_INLINE constexpr bfloat&                  \
  operator OPERATOR##=(bfloat& left, B right) {                                                 \
    left = left OPERATOR right;                                                                 \
    return left;                                                                                \
  }                                                                                             \
  template <typename A>                                                                         \
  requires(std::is_arithmetic_v<A>) METAL_SIM_INLINE constexpr A& operator OPERATOR##=(         \
      A& left, bfloat right) {                                                                  \
    left = static_cast<A>(left OPERATOR right);                                                 \
    return left;                                                                                \
  }

METAL_SIM_BFLOAT_ARITHMETIC(+)
METAL_SIM_BFLOAT_ARITHMETIC(-)
METAL_SIM_BFLOAT_ARITHMETIC(*)
METAL_SIM_BFLOAT_ARITHMETIC(/)
METAL_SIM_BFLOAT_COMPARISON(==)
METAL_SIM_BFLOAT_COMPARISON(!=)
METAL_SIM_BFLOAT_COMPARISON(<)
METAL_SIM_BFLOAT_COMPARISON(>)
METAL_SIM_BFLOAT_COMPARISON(<=)
METAL_SIM_BFLOAT_COMPARISON(>=)

#undef METAL_SIM_BFLOAT_COMPARISON
#undef METAL_SIM_BFLOAT_ARITHMETIC
