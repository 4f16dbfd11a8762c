// The launches that transform columns of activations as weights with an input transform read them,
// and back.
#pragma once

#include <cuda_runtime_api.h>

namespace marlin {
struct TransformColumnsCall;
}

namespace marlin::cuda {

/// Moves, scales or rotates columns.
cudaError_t LaunchTransformColumns(const TransformColumnsCall& call, cudaStream_t stream);

}  // namespace marlin::cuda
