// The launch of the router's product with its selection: rows to expert ids and weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/layout/tile_layout.h"
#include "backends/cuda/moe/router/router_launch.h"
#include "backends/cuda/moe/router/router_plan.h"

namespace marlin::cuda {

struct RouteRowsArguments {
  /// The selection. `router.logits`: device memory for logits; clusters do not write it.
  RouterArguments router;
  float* logits = nullptr;   ///< The same memory.
  const float* x = nullptr;  ///< [tokens, hidden], rows aligned to 16 bytes.
  int64_t x_stride = 0;
  int hidden = 0;
  const float* bias = nullptr;  ///< [experts], added to the logits, or null.
  TileView weights;             ///< bf16 codes.
  RouterPlan plan;
};

/// Call it before the first LaunchRouteRows.
cudaError_t LoadRouteRows();
/// Precondition: LoadRouter.
cudaError_t LaunchRouteRows(const RouteRowsArguments& args, const DeviceShape& device,
                            cudaStream_t stream);

/// Up to kMostDecodeRows in clusters, with the selection.
cudaError_t LoadDecodeRouter();
cudaError_t LaunchDecodeRouter(const RouteRowsArguments& args, cudaStream_t stream);
/// The logits of up to kMostDecodeRows.
cudaError_t LoadRouterGemv();
cudaError_t LaunchRouterGemv(const RouteRowsArguments& args, cudaStream_t stream);
/// The logits of more.
cudaError_t LoadRouterGemm();
cudaError_t LaunchRouterGemm(const RouteRowsArguments& args, const DeviceShape& device,
                             cudaStream_t stream);

}  // namespace marlin::cuda
