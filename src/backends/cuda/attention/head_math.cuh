// Arithmetic of norms and RoPE.
#pragma once

#include <cstdint>

#include "backends/cuda/common/fragment_math.cuh"

namespace marlin::cuda {

/// The factor of an RMS norm.
MARLIN_DEVICE float RmsFactor(double mean, float epsilon) {
  return __frsqrt_rn(static_cast<float>(mean + static_cast<double>(epsilon)));
}

/// Sine and cosine of angles up to pi / 4 in size, to 1 ULP. sinf and cosf have code for all
/// others, which would be inlined.
MARLIN_DEVICE float SineOfEighth(float x) {
  const float square = x * x;
  const float tail =
      __fmaf_rn(__fmaf_rn(-1.9515295891e-4f, square, 8.3321608736e-3f), square, -1.6666654611e-1f);
  return __fmaf_rn(tail * square, x, x);
}
MARLIN_DEVICE float CosineOfEighth(float x) {
  const float square = x * x;
  const float tail = __fmaf_rn(__fmaf_rn(2.443315711809948e-5f, square, -1.388731625493765e-3f),
                               square, 4.166664568298827e-2f);
  return __fmaf_rn(tail * square, square, __fmaf_rn(-0.5f, square, 1.0f));
}

/// The angle is reduced in double, so that large positions keep their precision.
MARLIN_DEVICE void RotationOf(float frequency, int64_t position, float factor, float* cosine,
                              float* sine) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  constexpr double kHalfPi = 1.57079632679489661923;
  const double angle = static_cast<double>(frequency) * static_cast<double>(position);
  const double quarters = rint(angle * kTwoOverPi);
  const auto rest = static_cast<float>(angle - quarters * kHalfPi);
  const auto quadrant = static_cast<int>(static_cast<int64_t>(quarters) & 3);
  const float s = SineOfEighth(rest);
  const float c = CosineOfEighth(rest);
  const float first = (quadrant & 1) != 0 ? s : c;
  const float second = (quadrant & 1) != 0 ? c : s;
  *cosine = factor * (quadrant == 1 || quadrant == 2 ? -first : first);
  *sine = factor * (quadrant >= 2 ? -second : second);
}

}  // namespace marlin::cuda
