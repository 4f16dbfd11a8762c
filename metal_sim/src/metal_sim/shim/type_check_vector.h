// Part of type_check.h: vectors, the traits of types, and the helpers of rewritten sources.
#pragma once

namespace metal_sim_program::metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <typename T>
using uniform = T;
template <typename T>
constexpr T make_uniform(T value) {
  return value;
}

/// Three elements without the gap after them; the others are like vectors here.
template <typename T>
struct packed_vec3 {
  T x, y, z;
  packed_vec3() = default;
  packed_vec3(vec<T, 3> value);
  operator vec<T, 3>() const;
};

}  // namespace metal_sim_program::metal

// Metal has the names of vectors in its namespace and outside of it.
#define METAL_SIM_DECLARE_VECTOR(T, ELEMENT, N, PACKED) \
  namespace metal_sim_program::metal {                  \
  using T##N = vec<ELEMENT, N>;                         \
  using packed_##T##N = PACKED;                         \
  }                                                     \
  using metal::packed_##T##N;                           \
  using metal::T##N;
#define METAL_SIM_DECLARE_VECTORS(T, ELEMENT)                                   \
  METAL_SIM_DECLARE_VECTOR(T, ELEMENT, 2, METAL_SIM_TYPE(vec<ELEMENT, 2>))      \
  METAL_SIM_DECLARE_VECTOR(T, ELEMENT, 3, METAL_SIM_TYPE(packed_vec3<ELEMENT>)) \
  METAL_SIM_DECLARE_VECTOR(T, ELEMENT, 4, METAL_SIM_TYPE(vec<ELEMENT, 4>))
#define METAL_SIM_TYPE(...) __VA_ARGS__

// As in OpenCL, comparisons of vectors give integers.
METAL_SIM_DECLARE_VECTORS(bool, int)
METAL_SIM_DECLARE_VECTORS(char, char)
METAL_SIM_DECLARE_VECTORS(uchar, uchar)
METAL_SIM_DECLARE_VECTORS(short, short)
METAL_SIM_DECLARE_VECTORS(ushort, ushort)
METAL_SIM_DECLARE_VECTORS(int, int)
METAL_SIM_DECLARE_VECTORS(uint, uint)
METAL_SIM_DECLARE_VECTORS(long, long)
METAL_SIM_DECLARE_VECTORS(ulong, ulong)
METAL_SIM_DECLARE_VECTORS(half, half)
METAL_SIM_DECLARE_VECTORS(float, float)
METAL_SIM_DECLARE_VECTORS(bfloat, bfloat)

#undef METAL_SIM_TYPE
#undef METAL_SIM_DECLARE_VECTORS
#undef METAL_SIM_DECLARE_VECTOR

namespace metal_sim_program::metal {

template <typename T, typename U>
struct is_same {
  static constexpr __constant bool value = false;
};
template <typename T>
struct is_same<T, T> {
  static constexpr __constant bool value = true;
};
template <typename T, typename U>
constexpr __constant bool is_same_v = is_same<T, U>::value;

template <bool kCondition, typename T, typename U>
struct conditional {
  using type = T;
};
template <typename T, typename U>
struct conditional<false, T, U> {
  using type = U;
};
template <bool kCondition, typename T, typename U>
using conditional_t = typename conditional<kCondition, T, U>::type;

template <bool kCondition, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  using type = T;
};
template <bool kCondition, typename T = void>
using enable_if_t = typename enable_if<kCondition, T>::type;

template <typename T>
constexpr __constant bool is_floating_point_v =
    is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <typename T>
constexpr __constant bool is_integral_v = __is_integral(T);

template <typename T>
struct numeric_limits {
  static constexpr T max();
  static constexpr T min();
  static constexpr T lowest();
  static constexpr T infinity();
  static constexpr T epsilon();
  static constexpr T quiet_NaN();
};

}  // namespace metal_sim_program::metal

namespace metal_sim {

/// Number of elements; 1 of a scalar.
template <typename T>
struct Shape {
  static constexpr __constant int kCount = 1;
};
template <typename T, int N>
struct Shape<metal::vec<T, N>> {
  static constexpr __constant int kCount = N;
};

/// The constructor of a vector from one operand: the conversion of a vector, or a scalar repeated.
template <typename To, typename From>
constexpr To Make(From value) {
  if constexpr (Shape<From>::kCount == 1) {
    return (To)(value);
  } else if constexpr (Shape<From>::kCount == Shape<To>::kCount) {
    return __builtin_convertvector(value, To);
  } else {
    static_assert(Shape<From>::kCount == 0, "a vector of another size");
  }
}

/// A vector from a list in braces, which may hold fewer elements. The first operand is no part.
template <typename To, typename... Parts>
To Listed(int, Parts... parts);

/// Variables of a threadgroup, as the rewriter leaves them.
template <typename T>
__local T& ThreadgroupVariable(int id, __constant const char* name);

}  // namespace metal_sim

template <typename To, typename From>
To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, value);
}
