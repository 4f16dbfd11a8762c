// Mixtures of experts: which experts a token goes to.
#pragma once

#include <cstdint>

#include "marlin/device.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

#pragma GCC visibility push(default)
namespace marlin {

/// How router logits become expert weights.
struct RouterOptions {
  enum class Scoring : uint8_t {
    kSoftmax,          ///< Softmax over all experts, then the top k (Qwen, Mixtral).
    kSoftmaxOfChosen,  ///< The top k logits, then softmax over those (gpt-oss).
    kSigmoid,          ///< Sigmoid per expert, chosen by score + bias (DeepSeek-V3, GLM).
  };
  int64_t top_k = 2;
  Scoring scoring = Scoring::kSoftmax;
  bool normalize = true;        ///< Divides the chosen weights by their sum.
  float scaling_factor = 1.0F;  ///< Multiplies the weights last.
  int64_t groups = 1;           ///< Experts in equal groups, chosen first ...
  int64_t top_groups = 1;       ///< ... by the sum of their two best biased scores.
  TensorView choice_bias = {};  ///< f32 [experts]; moves the choice, not the weights.
};

/// Picks top_k experts per row of logits [tokens, experts] (f32). ids is i32 and weights f32, both
/// [tokens, top_k], best first; equal scores go to the lower expert. Weights are computed in double
/// and rounded once. All memory is the device's; the call may return before its work on `stream` is
/// done. Errors: kInvalidArgument, also for a NaN or +Inf logit (naming token and expert), a token
/// without a finite logit, a NaN bias, and tensors that overlap; ids and weights are then
/// undefined. Errors of values come from Device::Synchronize where the device's memory is not the
/// host's.
Status RouteTokens(const Device& device, const TensorView& logits, const RouterOptions& options,
                   const MutableTensorView& ids, const MutableTensorView& weights,
                   void* stream = nullptr);

}  // namespace marlin
#pragma GCC visibility pop
