// Operators whose meaning differs from C++'s. The rewriter puts objects of this header into
// expressions, where precedence and associativity let them come between an operator's operands:
//
//   a << b   becomes   a << kLeftShift << b      (a << kLeftShift) << b
//   a >> b             a << kRightShift << b
//   a / b              a / kDivision / b         and % alike
//   a <<= b            a <<= kLeftShift = b      a <<= (kLeftShift = b), and >>=, /=, %= alike
//   auto x = e         auto x = kValue = e       x = (kValue = e)
//
// A shift takes its count modulo the width of the left operand. The quotient and remainder of
// integers that have none (Metal leaves the value open) are reported: they would end the process.
// auto takes the vector that a swizzle names, not the swizzle.
#pragma once

#include <limits>

#include "metal_sim/shim/msl_vector.h"

namespace metal_sim {

/// The value that `auto` deduces from an operand.
template <typename T>
METAL_SIM_INLINE constexpr auto ValueOf(T&& operand) {
  using Plain = std::remove_cvref_t<T>;
  if constexpr (std::is_class_v<Plain> && Vector<Plain>) {
    return static_cast<typename Unpacked<Plain>::type>(operand);
  } else {
    return static_cast<std::decay_t<T>>(static_cast<T&&>(operand));
  }
}

template <typename A, typename B>
concept Integers = std::is_integral_v<std::remove_cv_t<A>> && std::is_integral_v<B>;

METAL_SIM_UNINSTRUMENTED inline void ReportDivision(const char* what) {
  if (attached_runtime != nullptr) attached_runtime->fault(what, METAL_SIM_SITE);
  __builtin_trap();
}

template <typename T>
METAL_SIM_INLINE constexpr void CheckDivision(T dividend, T divisor) {
  if (divisor == 0) ReportDivision("division of an integer by zero");
  if constexpr (std::is_signed_v<T>) {
    if (divisor == -1 && dividend == std::numeric_limits<T>::min()) {
      ReportDivision("division of the smallest integer by -1");
    }
  }
}

/// The bits of a shift's count that matter.
template <typename T, typename Count>
METAL_SIM_INLINE constexpr int CountFor(Count count) {
  return static_cast<int>(count & (kBits<decltype(+T())> - 1));
}

template <typename T>
struct RightOperand {
  T value;
};

/// The common part of the objects: `object = b`, for compound assignments.
struct Marker {
  template <typename B>
  METAL_SIM_INLINE constexpr auto operator=(B&& right) const {
    using Value = decltype(ValueOf(static_cast<B&&>(right)));
    return RightOperand<Value>{ValueOf(static_cast<B&&>(right))};
  }
};

}  // namespace metal_sim

/// OPERATOR with its object, which stands after the left operand and a JOINT; CHECKED is the
/// operation on integers a and b.
#define METAL_SIM_MARKED(NAME, OPERATOR, JOINT, ...)                                     \
  namespace metal_sim {                                                                  \
  struct NAME : Marker {                                                                 \
    using Marker::operator=;                                                             \
    template <typename T>                                                                \
    struct Begun {                                                                       \
      T left;                                                                            \
    };                                                                                   \
    template <typename A, typename B>                                                    \
    METAL_SIM_INLINE static constexpr auto Apply(A a, B b) {                             \
      if constexpr (Integers<A, B>) {                                                    \
        __VA_ARGS__                                                                      \
      } else {                                                                           \
        return a OPERATOR b;                                                             \
      }                                                                                  \
    }                                                                                    \
  };                                                                                     \
  inline constexpr NAME k##NAME;                                                         \
  template <typename A>                                                                  \
  METAL_SIM_INLINE constexpr auto operator JOINT(A&& left, NAME) {                       \
    using Value = decltype(ValueOf(static_cast<A&&>(left)));                             \
    return NAME::Begun<Value>{ValueOf(static_cast<A&&>(left))};                          \
  }                                                                                      \
  template <typename T, typename B>                                                      \
  METAL_SIM_INLINE constexpr auto operator JOINT(NAME::Begun<T> begun, const B& right) { \
    return NAME::Apply(begun.left, ValueOf(right));                                      \
  }                                                                                      \
  template <typename A, typename B>                                                      \
  METAL_SIM_INLINE constexpr A& operator OPERATOR##=(A& left, RightOperand<B> right) {   \
    if constexpr (Integers<A, B>) {                                                      \
      left = static_cast<std::remove_cv_t<A>>(NAME::Apply(ValueOf(left), right.value));  \
      return left;                                                                       \
    } else {                                                                             \
      return left OPERATOR## = right.value;                                              \
    }                                                                                    \
  }                                                                                      \
  }

METAL_SIM_MARKED(LeftShift, <<, <<, return a << CountFor<A>(b);)
METAL_SIM_MARKED(RightShift, >>, <<, return a >> CountFor<A>(b);)
METAL_SIM_MARKED(Division, /, /, using T = decltype(a / b);
                 CheckDivision(static_cast<T>(a), static_cast<T>(b)); return a / b;)
METAL_SIM_MARKED(Remaindering, %, %, using T = decltype(a % b);
                 CheckDivision(static_cast<T>(a), static_cast<T>(b)); return a % b;)

#undef METAL_SIM_MARKED

namespace metal_sim {

struct AutoValue {
  template <typename T>
  METAL_SIM_INLINE constexpr auto operator=(T&& operand) const {
    return ValueOf(static_cast<T&&>(operand));
  }
};
inline constexpr AutoValue kAutoValue;

}  // namespace metal_sim
