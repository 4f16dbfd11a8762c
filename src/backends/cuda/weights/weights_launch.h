// Launches of the kernels that pack and dequantize weights. Each puts a kernel on a stream and
// returns its launch error; none allocates or synchronizes.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// Packs one expert from the canonical layout to tiles.
struct PackJob {
  CanonicalView from;
  const uint32_t* metadata = nullptr;  ///< Not null: 2:4 weights, for sparse tiles.
  TileView to;
  CodeKind kind = CodeKind::kFp4;
  uint8_t* tiles = nullptr;
  float scale_factor = 1;  ///< Power of two that normalizes scales and biases.
};
cudaError_t LaunchPackTiles(const PackJob& job, cudaStream_t stream);

/// Dequantizes W in fp32 arithmetic and rounds each weight once.
cudaError_t LaunchDequantizeTiles(const TileView& weights, CodeKind kind, const DenseView& out,
                                  cudaStream_t stream);
cudaError_t LaunchDequantizeCanonical(const CanonicalView& weights, const DenseView& out,
                                      cudaStream_t stream);

/// W^T as a 16-bit MMA operand: rows [n padded to blocks of 128][k padded to whole tiles].
cudaError_t LaunchDenseRows(const TileView& weights, CodeKind kind, bool bf16, void* out,
                            cudaStream_t stream);

/// Writes the dense tiles of sparse ones, as LaunchPackTiles packs expanded weights. `zero` is the
/// code of value 0.
cudaError_t LaunchExpandSparse(const TileView& from, const TileView& to, CodeKind kind,
                               uint32_t zero, uint8_t* tiles, cudaStream_t stream);

/// As LaunchDequantizeTiles, from sparse tiles.
cudaError_t LaunchDequantizeSparse(const TileView& weights, CodeKind kind, const DenseView& out,
                                   cudaStream_t stream);

/// As LaunchDequantizeTiles, from the marlin_w4 layout.
cudaError_t LaunchDequantizeMarlinW4(const MarlinW4View& weights, const DenseView& out,
                                     cudaStream_t stream);

}  // namespace marlin::cuda
