#include "backends/cuda/kernels/router/cuda_decoder.h"

#include <fmt/format.h>

#include "backends/cuda/kernels/router/router_launch.h"
#include "base/macros.h"
#include "plan/decoder_calls.h"

namespace marlin::cuda {

Status CudaDecoder::Load() const {
  const DeviceScope scope(device_.index);
  return device_.errors.Check(LoadRouter(), "moe_router_topk");
}

// The kernel switches on these numbers.
static_assert(static_cast<int>(RouterOptions::Scoring::kSoftmaxOfChosen) == 1);
static_assert(static_cast<int>(RouterOptions::Scoring::kSigmoid) == 2);

Status CudaDecoder::Run(const RouteTokensCall& call, const OperationContext& context) const {
  MARLIN_RETURN_IF_ERROR(device_.errors.Lost());
  if (call.logits.dim(1) > kMostRouterExperts) {
    return Status(Code::kUnsupported, fmt::format("router: {} experts; supported: up to {}",
                                                  call.logits.dim(1), kMostRouterExperts));
  }
  const DeviceScope scope(device_.index);
  RouterArguments args;
  args.logits = call.logits.As<float>();
  args.logits_stride = call.logits.stride(0);
  args.ids = call.ids.As<int32_t>();
  args.ids_stride = call.ids.stride(0);
  args.weights = call.weights.As<float>();
  args.weights_stride = call.weights.stride(0);
  args.bias = call.options.choice_bias.As<float>();
  args.tokens = static_cast<int>(call.logits.dim(0));
  args.experts = static_cast<int>(call.logits.dim(1));
  args.top_k = static_cast<int>(call.options.top_k);
  args.scoring = static_cast<int>(call.options.scoring);
  args.groups = static_cast<int>(call.options.groups);
  args.top_groups = static_cast<int>(call.options.top_groups);
  args.normalize = call.options.normalize;
  args.scaling_factor = static_cast<double>(call.options.scaling_factor);
  args.errors = errors_.view();
  return device_.errors.Check(LaunchRouter(args, static_cast<cudaStream_t>(context.stream)),
                              "moe_router_topk");
}

}  // namespace marlin::cuda
