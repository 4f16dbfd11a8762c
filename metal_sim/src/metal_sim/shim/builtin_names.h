// The names of Apple's built-in functions under the standard library that MLX calls, without their
// prefix __metal_: X(NAME) for functions of one, two and three numbers and a mode.
#pragma once

// clang-format 14 finds no end in such lists.
// clang-format off
#define METAL_SIM_BUILTINS_1(X) \
  X(acos) X(acosh) X(asin) X(asinh) X(atan) X(atanh) X(ceil) X(cos) X(cosh) X(cospi) X(exp) \
  X(exp10) X(exp2) X(fabs) X(floor) X(fract) X(log) X(log10) X(log2) X(rint) X(round) X(rsqrt) \
  X(sin) X(sinh) X(sinpi) X(sqrt) X(tan) X(tanh) X(tanpi) X(trunc)

#define METAL_SIM_BUILTINS_2(X) X(atan2) X(divide) X(fmax) X(fmin) X(fmod) X(pow) X(powr)

#define METAL_SIM_BUILTINS_3(X) X(fmax3) X(fmedian3) X(fmin3)

/// Functions of the lanes of a simdgroup.
#define METAL_SIM_SIMD_BUILTINS(X) \
  X(simd_broadcast) X(simd_max) X(simd_min) X(simd_prefix_exclusive_product) \
  X(simd_prefix_exclusive_sum) X(simd_prefix_inclusive_product) X(simd_prefix_inclusive_sum) \
  X(simd_product) X(simd_shuffle) X(simd_shuffle_and_fill_down) X(simd_shuffle_and_fill_up) \
  X(simd_shuffle_down) X(simd_shuffle_rotate_down) X(simd_shuffle_rotate_up) \
  X(simd_shuffle_up) X(simd_shuffle_xor) X(simd_sum) X(simd_xor)
// clang-format on
