// The channels of a gated delta net's convolution: queries, keys, values.
#pragma once

#include "backends/cuda/recurrent/convolution.cuh"

namespace marlin::cuda {

MARLIN_DEVICE Channel QueryChannel(const GatedDeltaArguments& args, int head, int feature) {
  return {int64_t{head} * args.key_dim + feature, args.queries, head, feature};
}
MARLIN_DEVICE Channel KeyChannel(const GatedDeltaArguments& args, int head, int feature) {
  const int64_t queries = int64_t{args.key_heads} * args.key_dim;
  return {queries + int64_t{head} * args.key_dim + feature, args.keys, head, feature};
}
/// `head`: a value head.
MARLIN_DEVICE Channel ValueChannel(const GatedDeltaArguments& args, int head, int feature) {
  const int64_t keys = int64_t{2} * args.key_heads * args.key_dim;
  const int group = args.group();
  return {keys + int64_t{head} * args.value_dim + feature, args.values, head / group,
          head % group * args.value_dim + feature};
}

}  // namespace marlin::cuda
