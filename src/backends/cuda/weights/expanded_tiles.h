// The dense tiles of sparse weights, for kernels that read only those: written to the workspace
// before every call, which takes a pass over the weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/weights/prepared_tiles.h"

namespace marlin::cuda {

/// Bytes of the workspace; 0 unless the weights are sparse.
int64_t ExpandedBytes(const PreparedTiles& weights);

/// Sets `tiles` to the dense tiles of an expert, after launching their expansion to `workspace` if
/// the weights are sparse. By PDL the kernel that reads them must not begin before that launch
/// ends.
cudaError_t ExpandTiles(const PreparedTiles& weights, int64_t expert, void* workspace,
                        cudaStream_t stream, TileView* tiles);

}  // namespace marlin::cuda
