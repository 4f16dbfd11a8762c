// The channels of a Mamba-2 mixer's convolution, and the steps of its rows.
#pragma once

#include "backends/cuda/recurrent/convolution.cuh"
#include "backends/cuda/recurrent/mamba2/mamba2_layout.h"
#include "backends/cuda/recurrent/recurrent_math.cuh"

namespace marlin::cuda {

/// Channel i of all: values of the heads, keys, queries of the groups.
MARLIN_DEVICE Channel MambaChannel(const Mamba2Arguments& args, int i) {
  const int values = args.value_heads * args.value_dim;
  const int keys = args.key_heads * args.key_dim;
  if (i < values) return {i, args.values, i / args.value_dim, i % args.value_dim};
  const int key = i - values;
  if (key < keys) return {i, args.keys, key / args.key_dim, key % args.key_dim};
  const int query = key - keys;
  return {i, args.queries, query / args.key_dim, query % args.key_dim};
}
MARLIN_DEVICE Channel ValueChannel(const Mamba2Arguments& args, int head, int feature) {
  return {int64_t{head} * args.value_dim + feature, args.values, head, feature};
}
MARLIN_DEVICE Channel KeyChannel(const Mamba2Arguments& args, int group, int feature) {
  const int64_t values = int64_t{args.value_heads} * args.value_dim;
  return {values + int64_t{group} * args.key_dim + feature, args.keys, group, feature};
}
MARLIN_DEVICE Channel QueryChannel(const Mamba2Arguments& args, int group, int feature) {
  const int64_t before =
      int64_t{args.value_heads} * args.value_dim + int64_t{args.key_heads} * args.key_dim;
  return {before + int64_t{group} * args.key_dim + feature, args.queries, group, feature};
}

MARLIN_DEVICE float BiasOf(const Mamba2Arguments& args, const Channel& channel) {
  return args.conv_bias == nullptr ? 0.0f : args.conv_bias[channel.index];
}

/// The step of a row of a head. NaN stays NaN.
MARLIN_DEVICE float StepOf(const Mamba2Arguments& args, int row, int head) {
  const float step = SoftPlus(*args.steps.At(row, head) + args.step_bias[head]);
  return step < args.min_step ? args.min_step : step > args.max_step ? args.max_step : step;
}

}  // namespace marlin::cuda
