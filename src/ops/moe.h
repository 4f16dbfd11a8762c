// The router in memory of its caller.
#pragma once

#include <cstdint>

#include "marlin/moe.h"
#include "plan/decoder_backend.h"

namespace marlin {

/// The workspace of RouteTokensIn for logits of this shape; 0 on a device without a router.
int64_t RouterWorkspaceBytes(const Device& device, const Shape& logits);

/// RouteTokens in the context's workspace, which has RouterWorkspaceBytes; null: the device's.
Status RouteTokensIn(const Device& device, const TensorView& logits, const RouterOptions& options,
                     const MutableTensorView& ids, const MutableTensorView& weights,
                     const OperationContext& context);

}  // namespace marlin
