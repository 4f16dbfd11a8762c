// Dequantization of prepared weights, whatever their layout.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/weights/prepared_tiles.h"

namespace marlin::cuda {

/// As LaunchDequantizeTiles, of one expert of any prepared weights.
cudaError_t LaunchDequantizePrepared(const PreparedTiles& weights, int64_t expert,
                                     const DenseView& out, cudaStream_t stream);

}  // namespace marlin::cuda
