// Mixture of experts (MoE): routing tokens to experts.
#pragma once

#include <cstdint>

#include "marlin/device.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

#pragma GCC visibility push(default)
namespace marlin {

/// How router logits become expert ids and weights.
struct RouterOptions {
  enum class Scoring : uint8_t {
    kSoftmax,          ///< Softmax over all experts, then the top k (Qwen, Mixtral).
    kSoftmaxOfChosen,  ///< Top k logits, then softmax over those (gpt-oss).
    kSigmoid,          ///< Sigmoid per expert, top k by score + bias (DeepSeek-V3, GLM).
  };
  int64_t top_k = 2;
  Scoring scoring = Scoring::kSoftmax;
  bool normalize = true;        ///< Divides the top-k weights by their sum.
  float scaling_factor = 1.0F;  ///< Multiplies the weights last.
  int64_t groups = 1;           ///< Group-limited routing: number of equal groups of experts ...
  int64_t top_groups = 1;       ///< ... and of groups kept, by their two best biased scores.
  TensorView choice_bias = {};  ///< Score-correction bias, f32 [experts]; not added to the weights.
};

/// Selects top_k experts per row of logits [tokens, experts] (f32). ids is i32 and weights f32,
/// both [tokens, top_k], best first; ties go to the lower expert. Weights are computed in double
/// and rounded once. All views are device memory; the call may return before its work on `stream`
/// is done. Errors: kInvalidArgument, also for a NaN or +Inf logit (naming token and expert), a
/// token without a finite logit, a NaN bias, and overlapping tensors; ids and weights are then
/// undefined. Errors that depend on values come from Device::Synchronize unless device memory is
/// host memory.
Status RouteTokens(const Device& device, const TensorView& logits, const RouterOptions& options,
                   const MutableTensorView& ids, const MutableTensorView& weights,
                   void* stream = nullptr);

}  // namespace marlin
#pragma GCC visibility pop
