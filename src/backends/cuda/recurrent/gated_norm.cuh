// The norm of a gated delta net's outputs.
#pragma once

#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/recurrent/recurrent_layout.h"
#include "backends/cuda/recurrent/recurrent_math.cuh"

namespace marlin::cuda {

/// Where the gates of a value head's row are.
MARLIN_DEVICE const float* GatesOf(const GatedDeltaArguments& args, int row, int head) {
  const int group = args.group();
  return args.gates.At(row, head / group) + head % group * args.value_dim;
}

/// out = RmsNorm(sums) * factor(feature) of a row of a value head. Called by a warp.
template <typename Factor>
MARLIN_DEVICE void StoreNormed(const GatedDeltaArguments& args, int row, int head,
                               const float* sums, const Factor& factor_of) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float squares = 0.0f;
  for (int i = lane; i < args.value_dim; i += 32) squares = __fmaf_rn(sums[i], sums[i], squares);
  const float mean = SumOverLanes(squares) / static_cast<float>(args.value_dim);
  const float factor = 1.0f / sqrtf(mean + args.epsilon);
  const int64_t to = args.out.At(row, head);
  for (int i = lane; i < args.value_dim; i += 32) {
    StoreFloat(args.out.data, args.out.type, to + i, sums[i] * factor * factor_of(i));
  }
}

/// Zeros for a row that does not take part. Called by a warp.
MARLIN_DEVICE void StoreNothing(const RecurrentArguments& args, int row, int head) {
  const int64_t to = args.out.At(row, head);
  for (int i = static_cast<int>(threadIdx.x) & 31; i < args.value_dim; i += 32) {
    StoreFloat(args.out.data, args.out.type, to + i, 0.0f);
  }
}

}  // namespace marlin::cuda
