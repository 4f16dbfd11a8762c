// The prefix sum over the threads of a CTA.
#pragma once

#include "backends/cuda/common/fragment_math.cuh"

namespace marlin::cuda {

/// The sum of the values of all threads before this one. Called by all threads of whole warps;
/// `warp_sums`: shared memory for one int per warp.
MARLIN_DEVICE int SumBefore(int value, int* warp_sums) {
  const auto thread = static_cast<int>(threadIdx.x);
  int inclusive = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffffU, inclusive, step);
    if ((thread & 31) >= step) inclusive += before;
  }
  if ((thread & 31) == 31) warp_sums[thread >> 5] = inclusive;
  __syncthreads();
  int sum = inclusive - value;
  for (int w = 0; w < thread >> 5; ++w) sum += warp_sums[w];
  return sum;
}

}  // namespace marlin::cuda
