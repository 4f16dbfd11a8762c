// The parameters of the kernels of Mamba2, by value.
#pragma once

#include "backends/cuda/recurrent/recurrent_layout.h"

namespace marlin::cuda {

/// Mamba2Call. Key heads are its groups, value heads its heads; `sums` is S^T q + skip * x.
struct Mamba2Arguments : RecurrentArguments {
  HeadsView gates;
  HeadsView values;
  HeadsView keys;
  HeadsView queries;
  HeadsView steps;  ///< Heads of one feature.
  const float* conv_bias = nullptr;
  const float* log_decay = nullptr;
  const float* step_bias = nullptr;
  const float* skip = nullptr;
  const float* norm = nullptr;
  bool norm_before_gate = false;
  float epsilon = 0;
  float min_step = 0;
  float max_step = 0;
  int slice_columns = 0;  ///< Value features of a CTA, a multiple of kWarpColumns.

  MARLIN_HOST_DEVICE int slices() const { return (value_dim + slice_columns - 1) / slice_columns; }
  /// Features that have a norm together.
  MARLIN_HOST_DEVICE int group_features() const { return group() * value_dim; }
};

/// Value features of a CTA, at most.
inline constexpr int kMambaColumns = 64;

}  // namespace marlin::cuda
