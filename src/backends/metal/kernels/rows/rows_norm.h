// Sums over rows, and RMS norms.
//
// A thread adds its columns in fp32; sums of threads are two floats, so that the sum of a row is
// right to an ULP. They are added with fma, whose factor 1 is a parameter, because a compiler that
// may reassociate sums would find that the second float is 0.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ROWS_ROWS_NORM_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ROWS_ROWS_NORM_H_

#include "backends/metal/kernels/rows/rows_elements.h"

namespace marlin {
namespace kernels {

/// a.x + a.y + b.x + b.y as two floats. `one` is 1.
static inline float2 AddTwoFloats(float2 a, float2 b, float one) {
  const float sum = metal::fma(a.x, one, b.x);
  const float of_b = metal::fma(sum, one, -a.x);
  const float of_a = metal::fma(sum, one, -of_b);
  const float lost = metal::fma(a.x, one, -of_a) + metal::fma(b.x, one, -of_b);
  return float2(sum, a.y + b.y + lost);
}

/// The sum over the lanes of a simdgroup, in all of them.
static METAL_FUNC float2 SumOfLanes(float2 sum, float one) {
  MARLIN_UNROLL
  for (ushort step = kLanes / 2; step > 0; step /= 2) {
    const float2 other =
        float2(metal::simd_shuffle_xor(sum.x, step), metal::simd_shuffle_xor(sum.y, step));
    sum = AddTwoFloats(sum, other, one);
  }
  return sum;
}

/// A sum that is not finite has no second part.
static inline float ValueOfSum(float2 sum) { return IsFinite(sum.x) ? sum.x + sum.y : sum.x; }

static inline float RmsFactor(float squares, int columns, float epsilon) {
  return metal::precise::rsqrt(squares / float(columns) + epsilon);
}

/// A value as a store to `type` rounds it.
static inline float Rounded(float value, int type) {
  if (type == kElementBf16) return FromBf16(ToBf16(value));
  return type == kElementF16 ? float(half(value)) : value;
}

/// A feature after the norm.
static inline float TimesNorm(float value, float factor, float weight) {
  return value * factor * weight;
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ROWS_ROWS_NORM_H_
