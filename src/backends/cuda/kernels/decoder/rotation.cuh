// The rotation of a pair of features by RoPE.
#pragma once

#include <cstdint>

#include "backends/cuda/kernels/common/fragment_math.cuh"

namespace marlin::cuda {

/// The angle is reduced in double, so that large positions keep their precision.
MARLIN_DEVICE void RotationOf(float frequency, int64_t position, float factor, float* cosine,
                              float* sine) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  constexpr double kHalfPi = 1.57079632679489661923;
  const double angle = static_cast<double>(frequency) * static_cast<double>(position);
  const double quarters = rint(angle * kTwoOverPi);
  const auto rest = static_cast<float>(angle - quarters * kHalfPi);
  const auto quadrant = static_cast<int>(static_cast<int64_t>(quarters) & 3);
  const float s = sinf(rest);
  const float c = cosf(rest);
  const float first = (quadrant & 1) != 0 ? s : c;
  const float second = (quadrant & 1) != 0 ? c : s;
  *cosine = factor * (quadrant == 1 || quadrant == 2 ? -first : first);
  *sine = factor * (quadrant >= 2 ? -second : second);
}

}  // namespace marlin::cuda
