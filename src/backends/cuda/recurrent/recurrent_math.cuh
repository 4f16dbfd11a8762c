// Arithmetic of recurrent mixers.
#pragma once

#include "backends/cuda/common/fragment_math.cuh"

namespace marlin::cuda {

MARLIN_DEVICE float SumOverLanes(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

/// The least logarithm of a row's decay: e to this power is zero, and sums of such numbers keep
/// their precision.
inline constexpr float kLeastDecay = -110.0f;

/// The logarithm of 1 + e^x, which above 20 is x in fp32.
MARLIN_DEVICE float SoftPlus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/// Inclusive sums over the lanes of a warp, after `before`, which becomes the last lane's sum.
MARLIN_DEVICE float SumThroughLanes(float value, float* before) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  const float sum = *before + value;
  *before += __shfl_sync(~0u, value, 31);
  return sum;
}

}  // namespace marlin::cuda
