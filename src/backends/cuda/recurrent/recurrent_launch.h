// Launches of the kernels of recurrent states.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/recurrent/recurrent_layout.h"

namespace marlin::cuda {

/// The gated delta rule row by row. `vector`: states are read 16 bytes at a time.
cudaError_t LoadRecurrent();
cudaError_t LaunchRecurrent(const GatedDeltaArguments& args, bool vector, cudaStream_t stream);
/// Replaces the convolution's inputs in states, where LaunchRecurrent does not.
cudaError_t LaunchWindows(const GatedDeltaArguments& args, cudaStream_t stream);
/// The gated norm of args.sums.
cudaError_t LaunchGatedNorm(const GatedDeltaArguments& args, cudaStream_t stream);

}  // namespace marlin::cuda
