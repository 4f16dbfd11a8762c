// vec<T, N> and packed_vec<T, N>: construction, conversion, operators, and the way to apply a
// function of scalars to their elements. Knows no function of the Metal library.
//
// Packed vectors and swizzles are operands too: every operation converts them to their vec.
#pragma once

#include "metal_sim/shim/msl_swizzle.h"

namespace metal_sim_program::metal {

template <typename T, int N>
struct packed_vec;

}  // namespace metal_sim_program::metal

namespace metal_sim {

/// Tells `float4 v = {x}`, which is (x, 0, 0, 0), from `float4 v(x)`, which is (x, x, x, x).
struct Braces {};

template <typename T>
struct Shape {
  using Element = T;
  static constexpr int kCount = 1;
  static constexpr bool kIsVector = false;
};
template <typename T, int N>
struct Shape<metal::vec<T, N>> {
  using Element = T;
  static constexpr int kCount = N;
  static constexpr bool kIsVector = true;
};
template <typename T, int N>
struct Shape<metal::packed_vec<T, N>> : Shape<metal::vec<T, N>> {};
template <typename T, int N, int... kIndices>
struct Shape<metal::Swizzle<T, N, kIndices...>> : Shape<metal::vec<T, sizeof...(kIndices)>> {};

template <typename T>
using Element = typename Shape<T>::Element;

template <typename T>
inline constexpr int kCount = Shape<T>::kCount;

template <typename T>
concept Vector = Shape<T>::kIsVector;

/// An operand of operators and functions of elements.
template <typename T>
concept Operand = Scalar<T> || Vector<T>;

/// Element `index` of a vector; a scalar stands for all.
template <Operand A>
METAL_SIM_INLINE constexpr Element<A> At(const A& operand, int index) {
  if constexpr (Vector<A>) {
    return operand[static_cast<size_t>(index)];
  } else {
    return operand;
  }
}

}  // namespace metal_sim

namespace metal_sim_program::metal {

template <typename T, int N>
struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec : metal_sim::Components<T, N> {
  using metal_sim::Components<T, N>::elements;

  vec() = default;

  /// All elements equal.
  template <metal_sim::Scalar U>
  METAL_SIM_INLINE constexpr vec(U value) {
    for (T& element : elements) element = static_cast<T>(value);
  }

  /// From a vector of as many elements of another type, each converted; silent where it has the
  /// same.
  template <metal_sim::Vector U>
  requires(metal_sim::kCount<U> == N) METAL_SIM_INLINE
      constexpr explicit(!std::is_same_v<metal_sim::Element<U>, T>) vec(const U& other) {
    Take(0, other);
  }

  /// From parts that have N elements together.
  template <metal_sim::Operand... Parts>
  requires(sizeof...(Parts) > 1 && (metal_sim::kCount<Parts> + ... + 0) == N) METAL_SIM_INLINE
      constexpr vec(const Parts&... parts) {
    int next = 0;
    ((Take(next, parts), next += metal_sim::kCount<Parts>), ...);
  }

  /// From braces, which may hold fewer; the others are 0.
  template <metal_sim::Operand... Parts>
  requires((metal_sim::kCount<Parts> + ... + 0) <= N) METAL_SIM_INLINE
      constexpr vec(metal_sim::Braces, const Parts&... parts) {
    int next = 0;
    ((Take(next, parts), next += metal_sim::kCount<Parts>), ...);
    for (; next < N; ++next) elements[next] = T(0);
  }

  METAL_SIM_INLINE constexpr T& operator[](size_t index) { return elements[index]; }
  METAL_SIM_INLINE constexpr const T& operator[](size_t index) const { return elements[index]; }

 private:
  template <metal_sim::Operand U>
  METAL_SIM_INLINE constexpr void Take(int first, const U& part) {
    for (int i = 0; i < metal_sim::kCount<U>; ++i) {
      elements[first + i] = static_cast<T>(metal_sim::At(part, i));
    }
  }
};

/// Vectors as memory holds them without gaps, aligned like their elements.
template <typename T, int N>
struct packed_vec : metal_sim::Components<T, N> {
  using metal_sim::Components<T, N>::elements;

  packed_vec() = default;

  template <metal_sim::Operand... Parts>
  requires std::is_constructible_v < vec<T, N>,
  const Parts&... > METAL_SIM_INLINE constexpr packed_vec(const Parts&... parts) {
    const vec<T, N> value(parts...);
    for (int i = 0; i < N; ++i) elements[i] = value.elements[i];
  }

  METAL_SIM_INLINE constexpr T& operator[](size_t index) { return elements[index]; }
  METAL_SIM_INLINE constexpr const T& operator[](size_t index) const { return elements[index]; }
};

}  // namespace metal_sim_program::metal

namespace metal_sim {

template <typename T, int N>
struct Unified<metal::vec<T, N>, metal::vec<T, N>> {
  using type = metal::vec<T, N>;
};
template <typename T, int N, Scalar S>
struct Unified<metal::vec<T, N>, S> {
  using type = metal::vec<T, N>;
};
template <Scalar S, typename T, int N>
struct Unified<S, metal::vec<T, N>> {
  using type = metal::vec<T, N>;
};

template <typename T>
struct Unpacked {
  using type = T;
};
template <typename T, int N>
struct Unpacked<metal::packed_vec<T, N>> {
  using type = metal::vec<T, N>;
};
template <typename T, int N, int... kIndices>
struct Unpacked<metal::Swizzle<T, N, kIndices...>> {
  using type = metal::vec<T, sizeof...(kIndices)>;
};

/// The type that operands of an operation are converted to; none for vectors that differ.
template <typename First, typename... Rest>
struct Common {
  using type = typename Unpacked<First>::type;
};
template <typename First, typename Second, typename... Rest>
struct Common<First, Second, Rest...>
    : Common<
          typename Unified<typename Unpacked<First>::type, typename Unpacked<Second>::type>::type,
          Rest...> {};

template <typename... Operands>
using CommonType = typename Common<Operands...>::type;

/// `function` of every element, the operands converted to their common type before.
template <typename Function, Operand... Operands>
METAL_SIM_INLINE constexpr auto Elementwise(Function function, const Operands&... operands) {
  using Type = CommonType<Operands...>;
  using T = Element<Type>;
  if constexpr (Vector<Type>) {
    using Result = decltype(function(static_cast<T>(At(operands, 0))...));
    metal::vec<Result, kCount<Type>> result;
    for (int i = 0; i < kCount<Type>; ++i) {
      result.elements[i] = function(static_cast<T>(At(operands, i))...);
    }
    return result;
  } else {
    return function(static_cast<T>(operands)...);
  }
}

/// Defines NAME(operands...) as a function of elements; the function follows, a lambda.
#define METAL_SIM_ELEMENTWISE(NAME, COUNT, ...)                                \
  template <metal_sim::Operand... Operands>                                    \
  requires(sizeof...(Operands) == COUNT) METAL_SIM_INLINE constexpr auto NAME( \
      const Operands&... operands) {                                           \
    return metal_sim::Elementwise(__VA_ARGS__, operands...);                   \
  }

// Division by zero yields 0 and overflow wraps: Metal leaves both open, and a trap would end the
// simulation.
template <typename T>
METAL_SIM_INLINE constexpr T Quotient(T dividend, T divisor) {
  if constexpr (IntegerScalar<T>) {
    if (divisor == 0) return 0;
    if constexpr (std::is_signed_v<T>) {
      if (divisor == -1) return static_cast<T>(0 - static_cast<std::make_unsigned_t<T>>(dividend));
    }
  }
  return static_cast<T>(dividend / divisor);
}

template <typename T>
METAL_SIM_INLINE constexpr T Remainder(T dividend, T divisor) {
  if (divisor == 0) return 0;
  if constexpr (std::is_signed_v<T>) {
    if (divisor == -1) return 0;
  }
  return static_cast<T>(dividend % divisor);
}

}  // namespace metal_sim

namespace metal_sim_program::metal {

#define METAL_SIM_OPERATOR(OPERATOR, EXPRESSION)                                                 \
  template <metal_sim::Operand A, metal_sim::Operand B>                                          \
  requires(metal_sim::Vector<A> || metal_sim::Vector<B>) METAL_SIM_INLINE constexpr auto         \
  operator OPERATOR(const A& left, const B& right) {                                             \
    return metal_sim::Elementwise([]<typename T>(T a, T b) { return EXPRESSION; }, left, right); \
  }
#define METAL_SIM_ARITHMETIC(OPERATOR, EXPRESSION)                              \
  METAL_SIM_OPERATOR(OPERATOR, static_cast<T>(EXPRESSION))                      \
  template <metal_sim::Vector A, metal_sim::Operand B>                          \
  METAL_SIM_INLINE constexpr A& operator OPERATOR##=(A& left, const B& right) { \
    left = left OPERATOR right;                                                 \
    return left;                                                                \
  }

METAL_SIM_ARITHMETIC(+, a + b)
METAL_SIM_ARITHMETIC(-, a - b)
METAL_SIM_ARITHMETIC(*, a* b)
METAL_SIM_ARITHMETIC(/, metal_sim::Quotient(a, b))
METAL_SIM_ARITHMETIC(%, metal_sim::Remainder(a, b))
METAL_SIM_ARITHMETIC(&, a& b)
METAL_SIM_ARITHMETIC(|, a | b)
METAL_SIM_ARITHMETIC(^, a ^ b)
// The count of a shift is taken modulo the width.
METAL_SIM_ARITHMETIC(<<, a << (b & (metal_sim::kBits<T> - 1)))
METAL_SIM_ARITHMETIC(>>, a >> (b & (metal_sim::kBits<T> - 1)))
METAL_SIM_OPERATOR(==, a == b)
METAL_SIM_OPERATOR(!=, a != b)
METAL_SIM_OPERATOR(<, a < b)
METAL_SIM_OPERATOR(>, a > b)
METAL_SIM_OPERATOR(<=, a <= b)
METAL_SIM_OPERATOR(>=, a >= b)
METAL_SIM_OPERATOR(&&, a&& b)
METAL_SIM_OPERATOR(||, a || b)

#undef METAL_SIM_ARITHMETIC
#undef METAL_SIM_OPERATOR

template <metal_sim::Vector A>
METAL_SIM_INLINE constexpr auto operator+(const A& operand) {
  return metal_sim::CommonType<A>(operand);
}
template <metal_sim::Vector A>
METAL_SIM_INLINE constexpr auto operator-(const A& operand) {
  return metal_sim::Elementwise([]<typename T>(T a) { return static_cast<T>(-a); }, operand);
}
template <metal_sim::Vector A>
METAL_SIM_INLINE constexpr auto operator~(const A& operand) {
  return metal_sim::Elementwise([]<typename T>(T a) { return static_cast<T>(~a); }, operand);
}
template <metal_sim::Vector A>
METAL_SIM_INLINE constexpr auto operator!(const A& operand) {
  return metal_sim::Elementwise([](auto a) { return !a; }, operand);
}
template <metal_sim::Vector A>
METAL_SIM_INLINE constexpr A& operator++(A& operand) {
  return operand += 1;
}
template <metal_sim::Vector A>
METAL_SIM_INLINE constexpr A& operator--(A& operand) {
  return operand -= 1;
}
template <metal_sim::Vector A>
METAL_SIM_INLINE constexpr A operator++(A& operand, int) {
  const A before = operand;
  operand += 1;
  return before;
}
template <metal_sim::Vector A>
METAL_SIM_INLINE constexpr A operator--(A& operand, int) {
  const A before = operand;
  operand -= 1;
  return before;
}

}  // namespace metal_sim_program::metal

// float2, packed_half4 and the like: Metal has them in its namespace and outside of it.
#define METAL_SIM_VECTOR_NAME(T, N)       \
  namespace metal_sim_program::metal {    \
  using T##N = vec<T, N>;                 \
  using packed_##T##N = packed_vec<T, N>; \
  }                                       \
  using metal::T##N;                      \
  using metal::packed_##T##N;
#define METAL_SIM_VECTOR_NAMES(T) \
  METAL_SIM_VECTOR_NAME(T, 2)     \
  METAL_SIM_VECTOR_NAME(T, 3)     \
  METAL_SIM_VECTOR_NAME(T, 4)

METAL_SIM_VECTOR_NAMES(bool)
METAL_SIM_VECTOR_NAMES(char)
METAL_SIM_VECTOR_NAMES(uchar)
METAL_SIM_VECTOR_NAMES(short)
METAL_SIM_VECTOR_NAMES(ushort)
METAL_SIM_VECTOR_NAMES(int)
METAL_SIM_VECTOR_NAMES(uint)
METAL_SIM_VECTOR_NAMES(long)
METAL_SIM_VECTOR_NAMES(ulong)
METAL_SIM_VECTOR_NAMES(half)
METAL_SIM_VECTOR_NAMES(bfloat)
METAL_SIM_VECTOR_NAMES(float)

#undef METAL_SIM_VECTOR_NAMES
#undef METAL_SIM_VECTOR_NAME

/// The bits of `value` as another type of the same size.
template <typename To, typename From>
METAL_SIM_INLINE constexpr To as_type(const From& value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  if constexpr (std::is_trivially_copyable_v<To> && std::is_trivially_copyable_v<From>) {
    return __builtin_bit_cast(To, value);
  } else {
    To result;
    __builtin_memcpy(static_cast<void*>(&result), static_cast<const void*>(&value), sizeof(To));
    return result;
  }
}
