#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/common/tile_gemm.h"

namespace marlin::cuda {

cudaError_t LaunchToy(const TileGemm& gemm, cudaStream_t stream);

}  // namespace marlin::cuda
