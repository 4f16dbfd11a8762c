// The router in memory of its caller.
#pragma once

#include <cstdint>

#include "marlin/moe.h"
#include "plan/step/decoder_backend.h"

namespace marlin {

/// The workspace of RouteTokensIn for logits of this shape; 0 on a device without a router.
int64_t RouterWorkspaceBytes(const Device& device, const Shape& logits);

/// RouteTokens in the context's workspace, which has RouterWorkspaceBytes; null: the device's.
Status RouteTokensIn(const Device& device, const TensorView& logits, const RouterOptions& options,
                     const MutableTensorView& ids, const MutableTensorView& weights,
                     const OperationContext& context);

/// Runs a router in one operation of the device, if it has one for these operands and the router's
/// accuracy allows it; false if not, and nothing has run. `logits`: memory for logits, f32
/// [tokens, experts], that the operation may use. Errors: as for RouteHiddenStates.
Result<bool> RouteInOne(const Device& device, const TensorView& x, const Router& router,
                        const MutableTensorView& logits, const MutableTensorView& ids,
                        const MutableTensorView& weights, void* stream);

/// For experts that take inputs multiplied by their weights (Llama 4): x[t] = weights[t] * x[t],
/// after which the weights are 1. x f32 [tokens, features] with contiguous columns, weights f32
/// [tokens, 1], contiguous. Errors: kInvalidArgument for other operands.
Status ScaleInputs(const Device& device, const MutableTensorView& weights,
                   const MutableTensorView& x, void* stream = nullptr);

}  // namespace marlin
