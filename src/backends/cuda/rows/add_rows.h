// The launch that adds the rows of another device to the sums of this one.
#pragma once

#include <cuda_runtime_api.h>

namespace marlin {
struct AddRowsCall;
}

namespace marlin::cuda {

/// Precondition: tokens and width are not 0.
cudaError_t LaunchAddRows(const AddRowsCall& call, cudaStream_t stream);

}  // namespace marlin::cuda
