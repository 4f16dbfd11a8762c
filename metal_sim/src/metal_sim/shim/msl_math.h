// Metal's common, math, relational and geometric functions of floats, of scalars and vectors. Knows
// nothing of integers, which share only the names min, max, clamp, abs and select.
//
// half and bfloat are computed in float and rounded once; the functions of the C library stand for
// Metal's, which are less accurate: nothing may depend on the last bit of exp or sin.
#pragma once

#include "metal_sim/shim/msl_vector.h"

namespace metal_sim {

// Where one operand is NaN the other is the result, min and max included, as Metal has it.
template <typename T>
METAL_SIM_INLINE constexpr T Minimum(T x, T y) {
  if constexpr (FloatScalar<T>) {
    if (x != x) return y;
  }
  return y < x ? y : x;
}

template <typename T>
METAL_SIM_INLINE constexpr T Maximum(T x, T y) {
  if constexpr (FloatScalar<T>) {
    if (x != x) return y;
  }
  return x < y ? y : x;
}

template <typename T>
METAL_SIM_INLINE constexpr T Median(T x, T y, T z) {
  return Maximum(Minimum(x, y), Minimum(Maximum(x, y), z));
}

template <FloatScalar T>
METAL_SIM_INLINE constexpr T Sign(T x) {
  if (x != x) return 0;
  return x > 0 ? T(1) : x < 0 ? T(-1) : x;
}

/// The bits of a float type that are not its sign.
template <FloatScalar T>
METAL_SIM_INLINE constexpr uint Magnitude(T x) {
  if constexpr (sizeof(T) == 2) {
    return __builtin_bit_cast(ushort, x) & 0x7fffu;
  } else {
    return __builtin_bit_cast(uint, x) & 0x7fffffffu;
  }
}

/// The magnitude of infinity.
template <FloatScalar T>
inline constexpr uint kInfinity = std::is_same_v<T, half>     ? 0x7c00u
                                  : std::is_same_v<T, bfloat> ? 0x7f80u
                                                              : 0x7f800000u;

/// The magnitude of the smallest normal number.
template <FloatScalar T>
inline constexpr uint kSmallestNormal = std::is_same_v<T, half>     ? 0x0400u
                                        : std::is_same_v<T, bfloat> ? 0x0080u
                                                                    : 0x00800000u;

/// a * b + c with one rounding. Doubles hold every product; the part that their sum loses is kept
/// in its last bit (rounding to odd), so the second rounding decides as the first would have.
template <FloatScalar T>
METAL_SIM_INLINE constexpr T FusedMultiplyAdd(T a, T b, T c) {
  if constexpr (std::is_same_v<T, float>) {
    return __builtin_fmaf(a, b, c);
  } else {
    const double product = static_cast<double>(a) * static_cast<double>(b);
    const double addend = static_cast<double>(c);
    const double sum = product + addend;
    const double part = sum - product;
    const double lost = (product - (sum - part)) + (addend - part);
    ulong bits = __builtin_bit_cast(ulong, sum);
    if (lost == lost && lost != 0 && (bits & 1) == 0) {
      bits += (lost > 0) == (sum > 0) ? 1 : -1;
    }
    return static_cast<T>(__builtin_bit_cast(double, bits));
  }
}

/// The next number of T after x towards y.
template <FloatScalar T>
METAL_SIM_INLINE constexpr T NextAfter(T x, T y) {
  using Bits = std::conditional_t<sizeof(T) == 2, ushort, uint>;
  if (x != x || y != y) return x + y;
  if (x == y) return y;
  constexpr Bits kSign = static_cast<Bits>(Bits(1) << (kBits<Bits> - 1));
  if (x == 0) return __builtin_bit_cast(T, static_cast<Bits>(y < 0 ? kSign | 1 : 1));
  const Bits bits = __builtin_bit_cast(Bits, x);
  return __builtin_bit_cast(T, static_cast<Bits>((x < y) == (x > 0) ? bits + 1 : bits - 1));
}

/// Multiples of pi, reduced before they are multiplied: the results at half turns are exact.
METAL_SIM_INLINE float SinePi(float x) {
  const float turn = __builtin_fmodf(x, 2.0f);
  if (turn == 0 || turn == 1 || turn == -1) return __builtin_copysignf(0.0f, x);
  return static_cast<float>(__builtin_sin(3.14159265358979323846L * turn));
}

METAL_SIM_INLINE float CosinePi(float x) {
  const float turn = __builtin_fabsf(__builtin_fmodf(x, 2.0f));
  if (turn == 0.5f || turn == 1.5f) return 0.0f;
  return static_cast<float>(__builtin_cos(3.14159265358979323846L * turn));
}

}  // namespace metal_sim

// NAME as a function of one, two or three floats: `...` computes it from x, y and z of type T,
// which are float where the operands are half or bfloat.
#define METAL_SIM_FLOAT_1(NAME, ...)                                       \
  METAL_SIM_ELEMENTWISE(NAME, 1, []<metal_sim::FloatScalar U>(U operand) { \
    const float x = operand;                                               \
    return static_cast<U>(__VA_ARGS__);                                    \
  })
#define METAL_SIM_FLOAT_2(NAME, ...)                                             \
  METAL_SIM_ELEMENTWISE(NAME, 2, []<metal_sim::FloatScalar U>(U left, U right) { \
    const float x = left, y = right;                                             \
    return static_cast<U>(__VA_ARGS__);                                          \
  })

namespace metal_sim_program::metal {

// Inline, so that metal::exp is metal::functions::exp and metal::precise and metal::fast can have
// all of them.
inline namespace functions {

METAL_SIM_FLOAT_1(acos, __builtin_acosf(x));
METAL_SIM_FLOAT_1(acosh, __builtin_acoshf(x));
METAL_SIM_FLOAT_1(asin, __builtin_asinf(x));
METAL_SIM_FLOAT_1(asinh, __builtin_asinhf(x));
METAL_SIM_FLOAT_1(atan, __builtin_atanf(x));
METAL_SIM_FLOAT_2(atan2, __builtin_atan2f(x, y));
METAL_SIM_FLOAT_1(atanh, __builtin_atanhf(x));
METAL_SIM_FLOAT_1(ceil, __builtin_ceilf(x));
METAL_SIM_FLOAT_2(copysign, __builtin_copysignf(x, y));
METAL_SIM_FLOAT_1(cos, __builtin_cosf(x));
METAL_SIM_FLOAT_1(cosh, __builtin_coshf(x));
METAL_SIM_FLOAT_1(cospi, metal_sim::CosinePi(x));
METAL_SIM_FLOAT_2(divide, x / y);
METAL_SIM_FLOAT_1(exp, __builtin_expf(x));
METAL_SIM_FLOAT_1(exp2, __builtin_exp2f(x));
METAL_SIM_FLOAT_1(exp10, __builtin_pow(10.0L, x));
METAL_SIM_FLOAT_1(fabs, __builtin_fabsf(x));
METAL_SIM_FLOAT_2(fdim, x > y ? x - y : x != x || y != y ? x + y : 0.0f);
METAL_SIM_FLOAT_1(floor, __builtin_floorf(x));
METAL_SIM_FLOAT_2(fmod, __builtin_fmodf(x, y));
METAL_SIM_FLOAT_1(log, __builtin_logf(x));
METAL_SIM_FLOAT_1(log2, __builtin_log2f(x));
METAL_SIM_FLOAT_1(log10, __builtin_log10f(x));
METAL_SIM_FLOAT_2(pow, __builtin_powf(x, y));
METAL_SIM_FLOAT_2(powr, x < 0 ? __builtin_nanf("") : __builtin_powf(x, y));
METAL_SIM_FLOAT_1(rint, __builtin_rintf(x));
METAL_SIM_FLOAT_1(round, __builtin_roundf(x));
METAL_SIM_FLOAT_1(rsqrt, 1.0L / __builtin_sqrt(x));
METAL_SIM_FLOAT_1(sin, __builtin_sinf(x));
METAL_SIM_FLOAT_1(sinh, __builtin_sinhf(x));
METAL_SIM_FLOAT_1(sinpi, metal_sim::SinePi(x));
METAL_SIM_FLOAT_1(sqrt, __builtin_sqrtf(x));
METAL_SIM_FLOAT_1(tan, __builtin_tanf(x));
METAL_SIM_FLOAT_1(tanh, __builtin_tanhf(x));
METAL_SIM_FLOAT_1(tanpi, metal_sim::SinePi(x) / metal_sim::CosinePi(x));
METAL_SIM_FLOAT_1(trunc, __builtin_truncf(x));

METAL_SIM_ELEMENTWISE(fma, 3, []<metal_sim::FloatScalar T>(T a, T b, T c) {
  return metal_sim::FusedMultiplyAdd(a, b, c);
});
METAL_SIM_ELEMENTWISE(nextafter, 2, []<metal_sim::FloatScalar T>(T x, T y) {
  return metal_sim::NextAfter(x, y);
});
METAL_SIM_ELEMENTWISE(fract, 1, []<metal_sim::FloatScalar T>(T x) {
  // Below 1, also where x is a little less than 0 and the difference rounds to 1.
  const T below_one = metal_sim::NextAfter(T(1), T(0));
  const T part = static_cast<T>(float(x) - __builtin_floorf(x));
  return part < below_one || part != part ? part : below_one;
});
METAL_SIM_ELEMENTWISE(ilogb, 1, []<metal_sim::FloatScalar T>(T x) { return __builtin_ilogbf(x); });

// min, max and clamp are for integers, too.
METAL_SIM_ELEMENTWISE(min, 2, [](auto x, auto y) { return metal_sim::Minimum(x, y); });
METAL_SIM_ELEMENTWISE(max, 2, [](auto x, auto y) { return metal_sim::Maximum(x, y); });
METAL_SIM_ELEMENTWISE(min3, 3, []<typename T>(T x, T y, T z) {
  return metal_sim::Minimum(x, metal_sim::Minimum(y, z));
});
METAL_SIM_ELEMENTWISE(max3, 3, []<typename T>(T x, T y, T z) {
  return metal_sim::Maximum(x, metal_sim::Maximum(y, z));
});
METAL_SIM_ELEMENTWISE(median3, 3,
                      []<typename T>(T x, T y, T z) { return metal_sim::Median(x, y, z); });
METAL_SIM_ELEMENTWISE(clamp, 3, []<typename T>(T x, T low, T high) {
  return metal_sim::Minimum(metal_sim::Maximum(x, low), high);
});
METAL_SIM_ELEMENTWISE(fmin, 2,
                      []<metal_sim::FloatScalar T>(T x, T y) { return metal_sim::Minimum(x, y); });
METAL_SIM_ELEMENTWISE(fmax, 2,
                      []<metal_sim::FloatScalar T>(T x, T y) { return metal_sim::Maximum(x, y); });
METAL_SIM_ELEMENTWISE(fmin3, 3, []<metal_sim::FloatScalar T>(T x, T y, T z) {
  return metal_sim::Minimum(x, metal_sim::Minimum(y, z));
});
METAL_SIM_ELEMENTWISE(fmax3, 3, []<metal_sim::FloatScalar T>(T x, T y, T z) {
  return metal_sim::Maximum(x, metal_sim::Maximum(y, z));
});
METAL_SIM_ELEMENTWISE(fmedian3, 3, []<metal_sim::FloatScalar T>(T x, T y, T z) {
  return metal_sim::Median(x, y, z);
});
METAL_SIM_ELEMENTWISE(saturate, 1, []<metal_sim::FloatScalar T>(T x) {
  return metal_sim::Minimum(metal_sim::Maximum(x, T(0)), T(1));
});
METAL_SIM_ELEMENTWISE(sign, 1, []<metal_sim::FloatScalar T>(T x) { return metal_sim::Sign(x); });
METAL_SIM_ELEMENTWISE(mix, 3, []<metal_sim::FloatScalar T>(T x, T y, T a) {
  return static_cast<T>(x + (y - x) * a);
});
METAL_SIM_ELEMENTWISE(step, 2,
                      []<metal_sim::FloatScalar T>(T edge, T x) { return x < edge ? T(0) : T(1); });
METAL_SIM_ELEMENTWISE(smoothstep, 3, []<metal_sim::FloatScalar T>(T low, T high, T x) {
  const T t = metal_sim::Minimum(metal_sim::Maximum(T((x - low) / (high - low)), T(0)), T(1));
  return static_cast<T>(t * t * (T(3) - T(2) * t));
});

METAL_SIM_ELEMENTWISE(isnan, 1, []<metal_sim::FloatScalar T>(T x) {
  return metal_sim::Magnitude(x) > metal_sim::kInfinity<T>;
});
METAL_SIM_ELEMENTWISE(isinf, 1, []<metal_sim::FloatScalar T>(T x) {
  return metal_sim::Magnitude(x) == metal_sim::kInfinity<T>;
});
METAL_SIM_ELEMENTWISE(isfinite, 1, []<metal_sim::FloatScalar T>(T x) {
  return metal_sim::Magnitude(x) < metal_sim::kInfinity<T>;
});
METAL_SIM_ELEMENTWISE(isnormal, 1, []<metal_sim::FloatScalar T>(T x) {
  const uint bits = metal_sim::Magnitude(x);
  return bits >= metal_sim::kSmallestNormal<T> && bits < metal_sim::kInfinity<T>;
});
METAL_SIM_ELEMENTWISE(signbit, 1, []<metal_sim::FloatScalar T>(T x) {
  return __builtin_signbit(static_cast<float>(x)) != 0;
});
METAL_SIM_ELEMENTWISE(isordered, 2,
                      []<metal_sim::FloatScalar T>(T x, T y) { return x == x && y == y; });
METAL_SIM_ELEMENTWISE(isunordered, 2,
                      []<metal_sim::FloatScalar T>(T x, T y) { return x != x || y != y; });

/// x * 2^k, rounded once; the element type of `exponent` is int.
template <metal_sim::Operand X, metal_sim::Operand K>
METAL_SIM_INLINE constexpr auto ldexp(const X& x, const K& exponent) {
  using T = metal_sim::Element<X>;
  metal_sim::CommonType<X> result = x;
  if constexpr (metal_sim::Vector<X>) {
    for (int i = 0; i < metal_sim::kCount<X>; ++i) {
      result[i] =
          static_cast<T>(__builtin_ldexp(static_cast<float>(x[i]), metal_sim::At(exponent, i)));
    }
  } else {
    result = static_cast<T>(__builtin_ldexp(static_cast<float>(x), exponent));
  }
  return result;
}

/// The fraction of x in [0.5, 1) and the exponent of 2 that belongs to it.
template <metal_sim::FloatScalar T>
METAL_SIM_INLINE T frexp(T x, int& exponent) {
  int result = 0;
  const T fraction = static_cast<T>(__builtin_frexpf(x, &result));
  exponent = result;
  return fraction;
}
template <metal_sim::FloatScalar T, int N>
METAL_SIM_INLINE vec<T, N> frexp(const vec<T, N>& x, vec<int, N>& exponent) {
  vec<T, N> result;
  for (int i = 0; i < N; ++i) result[i] = frexp(x[i], exponent[i]);
  return result;
}

/// The fraction of x, of its sign; `whole` becomes the rest.
template <metal_sim::Operand X>
METAL_SIM_INLINE X modf(const X& x, X& whole) {
  const X rest = trunc(x);
  whole = rest;
  // Infinity has no fraction.
  return copysign(metal_sim::Elementwise(
                      []<typename T>(T a, T b) { return a == b ? T(0) : T(a - b); }, x, rest),
                  x);
}

/// The sine of x; `cosine` becomes its cosine.
template <metal_sim::Operand X>
METAL_SIM_INLINE X sincos(const X& x, X& cosine) {
  cosine = cos(x);
  return sin(x);
}

template <metal_sim::Operand A>
METAL_SIM_INLINE constexpr auto abs(const A& operand) {
  return metal_sim::Elementwise(
      []<typename T>(T x) {
        if constexpr (metal_sim::FloatScalar<T>) {
          return static_cast<T>(__builtin_fabsf(x));
        } else {
          return static_cast<T>(x < 0 ? 0 - x : x);
        }
      },
      operand);
}

/// `chosen` where the condition holds, otherwise `other`: element by element for vectors.
template <metal_sim::Operand A, metal_sim::Operand B, metal_sim::Operand C>
METAL_SIM_INLINE constexpr auto select(const A& other, const B& chosen, const C& condition) {
  using Result = metal_sim::CommonType<A, B>;
  using T = metal_sim::Element<Result>;
  static_assert(metal_sim::kCount<C> == 1 || metal_sim::kCount<C> == metal_sim::kCount<Result>,
                "select needs a condition for every element");
  if constexpr (metal_sim::Vector<Result>) {
    Result result;
    for (int i = 0; i < metal_sim::kCount<Result>; ++i) {
      result[i] = static_cast<T>(metal_sim::At(condition, i) ? metal_sim::At(chosen, i)
                                                             : metal_sim::At(other, i));
    }
    return result;
  } else {
    return static_cast<T>(condition ? chosen : other);
  }
}

template <metal_sim::Operand A>
METAL_SIM_INLINE constexpr bool any(const A& operand) {
  bool result = false;
  for (int i = 0; i < metal_sim::kCount<A>; ++i) result |= bool(metal_sim::At(operand, i));
  return result;
}
template <metal_sim::Operand A>
METAL_SIM_INLINE constexpr bool all(const A& operand) {
  bool result = true;
  for (int i = 0; i < metal_sim::kCount<A>; ++i) result &= bool(metal_sim::At(operand, i));
  return result;
}

// Sums of products in the order of the elements, each step rounded to the type.
template <metal_sim::Vector A, metal_sim::Vector B>
METAL_SIM_INLINE constexpr auto dot(const A& left, const B& right) {
  const auto products = left * right;
  auto sum = products[0];
  for (int i = 1; i < metal_sim::kCount<A>; ++i) sum = sum + products[i];
  return sum;
}
template <metal_sim::Vector A>
METAL_SIM_INLINE constexpr auto length_squared(const A& operand) {
  return dot(operand, operand);
}
template <metal_sim::Vector A>
METAL_SIM_INLINE constexpr auto length(const A& operand) {
  return sqrt(dot(operand, operand));
}
template <metal_sim::Vector A, metal_sim::Vector B>
METAL_SIM_INLINE constexpr auto distance_squared(const A& left, const B& right) {
  return length_squared(left - right);
}
template <metal_sim::Vector A, metal_sim::Vector B>
METAL_SIM_INLINE constexpr auto distance(const A& left, const B& right) {
  return length(left - right);
}
template <metal_sim::Vector A>
METAL_SIM_INLINE constexpr auto normalize(const A& operand) {
  return operand * rsqrt(dot(operand, operand));
}
template <metal_sim::Vector A, metal_sim::Vector B>
requires(metal_sim::kCount<A> == 3 && metal_sim::kCount<B> == 3) METAL_SIM_INLINE
    constexpr auto cross(const A& left, const B& right) {
  const metal_sim::CommonType<A, B> a = left, b = right;
  return a.yzx * b.zxy - a.zxy * b.yzx;
}
template <metal_sim::Vector A, metal_sim::Vector B, metal_sim::Vector C>
METAL_SIM_INLINE constexpr auto faceforward(const A& normal, const B& incident,
                                            const C& reference) {
  const metal_sim::CommonType<A, B, C> front = normal;
  return dot(reference, incident) < 0 ? front : -front;
}
template <metal_sim::Vector A, metal_sim::Vector B>
METAL_SIM_INLINE constexpr auto reflect(const A& incident, const B& normal) {
  using T = metal_sim::Element<A>;
  return incident - normal * T(T(2) * dot(normal, incident));
}
template <metal_sim::Vector A, metal_sim::Vector B>
METAL_SIM_INLINE constexpr auto refract(const A& incident, const B& normal,
                                        metal_sim::Element<A> ratio) {
  using T = metal_sim::Element<A>;
  const T cosine = dot(normal, incident);
  const T rest = T(1) - ratio * ratio * (T(1) - cosine * cosine);
  if (rest < T(0)) return metal_sim::CommonType<A, B>(T(0));
  return incident * ratio - normal * T(ratio * cosine + sqrt(rest));
}

}  // namespace functions

// The simulator computes every variant precisely. Name by name: a function that a program adds to
// one of the namespaces would hide the names of a using-directive.
#define METAL_SIM_USE_FUNCTIONS                                                                    \
  using functions::abs, functions::acos, functions::acosh, functions::all, functions::any,         \
      functions::asin, functions::asinh, functions::atan, functions::atan2, functions::atanh,      \
      functions::ceil, functions::clamp, functions::copysign, functions::cos, functions::cosh,     \
      functions::cospi, functions::cross, functions::distance, functions::distance_squared,        \
      functions::divide, functions::dot, functions::exp, functions::exp10, functions::exp2,        \
      functions::fabs, functions::faceforward, functions::fdim, functions::floor, functions::fma,  \
      functions::fmax, functions::fmax3, functions::fmedian3, functions::fmin, functions::fmin3,   \
      functions::fmod, functions::fract, functions::frexp, functions::ilogb, functions::isfinite,  \
      functions::isinf, functions::isnan, functions::isnormal, functions::isordered,               \
      functions::isunordered, functions::ldexp, functions::length, functions::length_squared,      \
      functions::log, functions::log10, functions::log2, functions::max, functions::max3,          \
      functions::median3, functions::min, functions::min3, functions::mix, functions::modf,        \
      functions::nextafter, functions::normalize, functions::pow, functions::powr,                 \
      functions::reflect, functions::refract, functions::rint, functions::round, functions::rsqrt, \
      functions::saturate, functions::select, functions::sign, functions::signbit, functions::sin, \
      functions::sincos, functions::sinh, functions::sinpi, functions::smoothstep,                 \
      functions::sqrt, functions::step, functions::tan, functions::tanh, functions::tanpi,         \
      functions::trunc;

namespace precise {
METAL_SIM_USE_FUNCTIONS
}
namespace fast {
METAL_SIM_USE_FUNCTIONS
}

#undef METAL_SIM_USE_FUNCTIONS

}  // namespace metal_sim_program::metal

#undef METAL_SIM_FLOAT_1
#undef METAL_SIM_FLOAT_2
