#include "marlin/moe.h"

#include <fmt/core.h>

#include <cmath>

#include "base/macros.h"
#include "ops/device/checks.h"
#include "ops/device/device.h"
#include "ops/moe/moe.h"
#include "plan/step/decoder_calls.h"

namespace marlin {
namespace {

Status CheckOptions(const RouterOptions& options, int64_t experts) {
  if (options.scoring > RouterOptions::Scoring::kSigmoid) {
    return Invalid(fmt::format("scoring: unknown number {}", static_cast<int>(options.scoring)));
  }
  if (options.top_k < 1 || options.top_k > experts) {
    return Invalid(fmt::format("top_k: expected 1..{} (experts), got {}", experts, options.top_k));
  }
  if (options.groups < 1 || experts % options.groups != 0) {
    return Invalid(
        fmt::format("groups: {} experts cannot be in {} equal groups", experts, options.groups));
  }
  if (options.top_groups < 1 || options.top_groups > options.groups) {
    return Invalid(fmt::format("top_groups: expected 1..{} (groups), got {}", options.groups,
                               options.top_groups));
  }
  if (options.best_of_group < 1 || options.best_of_group > 2) {
    return Invalid(fmt::format("best_of_group: expected 1 or 2, got {}", options.best_of_group));
  }
  if (!(options.least_sum >= 0) || std::isinf(options.least_sum)) {
    return Invalid(
        fmt::format("least_sum: expected a finite number from 0 on, got {}", options.least_sum));
  }
  const int64_t eligible = experts / options.groups * options.top_groups;
  if (options.top_k > eligible) {
    return Invalid(fmt::format("top_k: {} experts of the {} in {} selected groups", options.top_k,
                               eligible, options.top_groups));
  }
  MARLIN_RETURN_IF_ERROR(CheckVector("scales", options.scales, experts, true));
  return CheckVector("choice_bias", options.choice_bias, experts, true);
}

Status CheckOutput(const char* name, const MutableTensorView& view, DType dtype,
                   const Shape& shape) {
  if (view.dtype() != dtype || !(view.shape() == shape)) {
    return Invalid(fmt::format("{}: expected {} {}, got {} {}", name, DTypeName(dtype),
                               shape.ToString(), DTypeName(view.dtype()), view.shape().ToString()));
  }
  return CheckMemory(name, view);
}

/// Checks everything of a router's call but its logits.
Status CheckSelections(const RouterOptions& options, int64_t tokens, int64_t experts,
                       const MutableTensorView& ids, const MutableTensorView& weights) {
  MARLIN_RETURN_IF_ERROR(CheckOptions(options, experts));
  const Shape shape{tokens, options.top_k};
  MARLIN_RETURN_IF_ERROR(CheckOutput("ids", ids, DType::kI32, shape));
  MARLIN_RETURN_IF_ERROR(CheckOutput("weights", weights, DType::kF32, shape));
  return CheckNoOverlap("weights", weights, "ids", ids, false);
}

}  // namespace

int64_t RouterWorkspaceBytes(const Device& device, const Shape& logits) {
  const DecoderBackend* const decoder = Internals::Impl(device).decoder();
  if (decoder == nullptr || !decoder->Has(DecoderOperation::kRouteTokens)) return 0;
  const RouterOptions options;
  const TensorView shaped(nullptr, DType::kF32, logits);
  return decoder->WorkspaceBytes(RouteTokensCall{shaped, options, {}, {}});
}

Status RouteTokens(const Device& device, const TensorView& logits, const RouterOptions& options,
                   const MutableTensorView& ids, const MutableTensorView& weights, void* stream) {
  return RouteTokensIn(device, logits, options, ids, weights, {stream, nullptr});
}

Status RouteTokensIn(const Device& device, const TensorView& logits, const RouterOptions& options,
                     const MutableTensorView& ids, const MutableTensorView& weights,
                     const OperationContext& context) {
  if (logits.rank() != 2 || logits.dtype() != DType::kF32) {
    return Invalid(fmt::format("logits: expected f32 of rank 2, got {} of rank {}",
                               DTypeName(logits.dtype()), logits.rank()));
  }
  MARLIN_RETURN_IF_ERROR(CheckActivations("logits", logits, logits.shape()));
  MARLIN_RETURN_IF_ERROR(CheckSelections(options, logits.dim(0), logits.dim(1), ids, weights));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("ids", ids, "logits", logits, false));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("weights", weights, "logits", logits, false));
  if (logits.dim(0) == 0) return {};
  return RunOperation(device, RouteTokensCall{logits, options, ids, weights}, context.stream,
                      context.workspace);
}

Result<bool> RouteInOne(const Device& device, const TensorView& x, const Router& router,
                        const MutableTensorView& logits, const MutableTensorView& ids,
                        const MutableTensorView& weights, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckWeights(device, router.weights).WithContext("router"));
  const DecoderBackend* const decoder = Internals::Impl(device).decoder();
  if (router.accuracy != Accuracy::kDefault || decoder == nullptr || x.rank() != 2) return false;
  const PreparedWeights::Storage& matrix = *Internals::Storage(router.weights);
  const RouteRowsCall call{x, matrix, router.bias, router.options, ids, weights};
  if (x.dim(0) < 1 || x.dim(1) != matrix.spec.k || !decoder->RoutesRows(call)) return false;
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckVector("bias", router.bias, matrix.spec.n, false));
  MARLIN_RETURN_IF_ERROR(CheckSelections(router.options, x.dim(0), matrix.spec.n, ids, weights));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("ids", ids, "x", x, false));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("weights", weights, "x", x, false));
  MARLIN_RETURN_IF_ERROR(decoder->RouteRows(call, {stream, logits.data()}));
  return true;
}

Status ScaleInputs(const Device& device, const MutableTensorView& weights,
                   const MutableTensorView& x, void* stream) {
  if (x.rank() != 2 || x.dtype() != DType::kF32) {
    return Invalid(fmt::format("x: expected f32 of rank 2, got {} of rank {}", DTypeName(x.dtype()),
                               x.rank()));
  }
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckOutput("weights", weights, DType::kF32, {x.dim(0), 1}));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("x", x, "weights", weights, false));
  if (x.ElementCount() == 0) return {};
  return RunOperation(device, ScaleInputsCall{weights, x}, stream);
}

}  // namespace marlin
