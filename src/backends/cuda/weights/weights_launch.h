// The kernels that make prepared weights, and those that write them out again. Every launch is put
// on a stream and returns CUDA's answer; nothing here allocates or waits.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// Canonical words to tiles, one expert.
struct PackJob {
  CanonicalView from;
  TileView to;
  CodeKind kind = CodeKind::kFp4;
  uint8_t* tiles = nullptr;
  float scale_factor = 1;  ///< Power of two that normalises scales and biases.
};
cudaError_t LaunchPackTiles(const PackJob& job, cudaStream_t stream);

/// W in fp32 arithmetic, each weight rounded once.
cudaError_t LaunchDequantizeTiles(const TileView& weights, CodeKind kind, const DenseView& out,
                                  cudaStream_t stream);
cudaError_t LaunchDequantizeCanonical(const CanonicalView& weights, const DenseView& out,
                                      cudaStream_t stream);

/// W^T as a matrix unit's operands: 16-bit rows [n to whole blocks of 128][k to whole tiles].
cudaError_t LaunchDenseRows(const TileView& weights, CodeKind kind, bool bf16, void* out,
                            cudaStream_t stream);

/// W in fp32 arithmetic, each weight rounded once.
cudaError_t LaunchDequantizeMarlinW4(const MarlinW4View& weights, const DenseView& out,
                                     cudaStream_t stream);

}  // namespace marlin::cuda
