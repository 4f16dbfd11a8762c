// Apple's built-in functions under the standard library, by the names that MLX calls: it adds
// overloads for bfloat of its own that way. Not documented; these behave as MLX relies on.
#pragma once

#include "metal_sim/shim/builtin_names.h"
#include "metal_sim/shim/msl_math.h"
#include "metal_sim/shim/msl_simdgroup.h"

namespace metal_sim {

/// The last operand of mathematical built-ins. The simulator's functions are as precise either way.
enum class MathMode { kPrecise, kFast };

/// SIMD reduction of the bits of a number.
template <typename T>
METAL_SIM_INLINE T SimdXor(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return as_type<float>(metal::simd_xor(as_type<uint>(x)));
  } else {
    return metal::simd_xor(x);
  }
}

}  // namespace metal_sim

#define __METAL_PRECISE_MATH__ (::metal_sim::MathMode::kPrecise)
#define __METAL_FAST_MATH__ (::metal_sim::MathMode::kFast)
#define __METAL_MAYBE_FAST_MATH__ __METAL_FAST_MATH__

#define METAL_SIM_BUILTIN_1(NAME)                                 \
  template <typename T>                                           \
  METAL_SIM_INLINE T __metal_##NAME(T x, ::metal_sim::MathMode) { \
    return ::metal::NAME(x);                                      \
  }
#define METAL_SIM_BUILTIN_2(NAME)                                      \
  template <typename T>                                                \
  METAL_SIM_INLINE T __metal_##NAME(T x, T y, ::metal_sim::MathMode) { \
    return ::metal::NAME(x, y);                                        \
  }
#define METAL_SIM_BUILTIN_3(NAME)                                           \
  template <typename T>                                                     \
  METAL_SIM_INLINE T __metal_##NAME(T x, T y, T z, ::metal_sim::MathMode) { \
    return ::metal::NAME(x, y, z);                                          \
  }

METAL_SIM_BUILTINS_1(METAL_SIM_BUILTIN_1)
METAL_SIM_BUILTINS_2(METAL_SIM_BUILTIN_2)
METAL_SIM_BUILTINS_3(METAL_SIM_BUILTIN_3)

#undef METAL_SIM_BUILTIN_1
#undef METAL_SIM_BUILTIN_2
#undef METAL_SIM_BUILTIN_3

METAL_SIM_INLINE float __metal_fma(float x, float y, float z) { return ::metal::fma(x, y, z); }
METAL_SIM_INLINE float __metal_frexp(float x, int* exponent) {
  return ::metal::frexp(x, *exponent);
}
METAL_SIM_INLINE float __metal_ldexp(float x, int exponent, ::metal_sim::MathMode) {
  return ::metal::ldexp(x, exponent);
}
METAL_SIM_INLINE float __metal_nextafter(float x, float y) { return ::metal::nextafter(x, y); }

// Functions of the lanes of a simdgroup. Macros, so that a finding names the place of the call.
#define __metal_simd_broadcast(...) (::metal::simd_broadcast(__VA_ARGS__))
#define __metal_simd_max(...) (::metal::simd_max(__VA_ARGS__))
#define __metal_simd_min(...) (::metal::simd_min(__VA_ARGS__))
#define __metal_simd_prefix_exclusive_product(...) \
  (::metal::simd_prefix_exclusive_product(__VA_ARGS__))
#define __metal_simd_prefix_exclusive_sum(...) (::metal::simd_prefix_exclusive_sum(__VA_ARGS__))
#define __metal_simd_prefix_inclusive_product(...) \
  (::metal::simd_prefix_inclusive_product(__VA_ARGS__))
#define __metal_simd_prefix_inclusive_sum(...) (::metal::simd_prefix_inclusive_sum(__VA_ARGS__))
#define __metal_simd_product(...) (::metal::simd_product(__VA_ARGS__))
#define __metal_simd_shuffle(...) (::metal::simd_shuffle(__VA_ARGS__))
#define __metal_simd_shuffle_and_fill_down(...) (::metal::simd_shuffle_and_fill_down(__VA_ARGS__))
#define __metal_simd_shuffle_and_fill_up(...) (::metal::simd_shuffle_and_fill_up(__VA_ARGS__))
#define __metal_simd_shuffle_down(...) (::metal::simd_shuffle_down(__VA_ARGS__))
#define __metal_simd_shuffle_rotate_down(...) (::metal::simd_shuffle_rotate_down(__VA_ARGS__))
#define __metal_simd_shuffle_rotate_up(...) (::metal::simd_shuffle_rotate_up(__VA_ARGS__))
#define __metal_simd_shuffle_up(...) (::metal::simd_shuffle_up(__VA_ARGS__))
#define __metal_simd_shuffle_xor(...) (::metal::simd_shuffle_xor(__VA_ARGS__))
#define __metal_simd_sum(...) (::metal::simd_sum(__VA_ARGS__))
#define __metal_simd_xor(...) (::metal_sim::SimdXor(__VA_ARGS__))

METAL_SIM_UNINSTRUMENTED inline ushort __metal_get_simdgroup_size(ushort) {
  return static_cast<ushort>(
      ::metal_sim::attached_runtime->position(::metal_sim::Source::kThreadsPerSimdgroup).x);
}
METAL_SIM_UNINSTRUMENTED inline ushort __metal_get_thread_index_in_simdgroup(ushort) {
  return static_cast<ushort>(
      ::metal_sim::attached_runtime->position(::metal_sim::Source::kThreadIndexInSimdgroup).x);
}
