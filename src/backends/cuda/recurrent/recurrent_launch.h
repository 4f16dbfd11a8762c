// Launches of the kernels of recurrent states.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/recurrent/recurrent_layout.h"

namespace marlin::cuda {

/// The gated delta rule row by row. `vector`: states are read 16 bytes at a time.
cudaError_t LoadRecurrent();
cudaError_t LaunchRecurrent(const GatedDeltaArguments& args, bool vector, cudaStream_t stream);
/// The same, in another order of sums, of sequences of a few rows: heads of kDecodedFeatures keys
/// and values, a convolution of kDecodedConvWidth, inputs and states aligned to 16 bytes, and
/// counters where value heads share a key head. `norms_apart` has no effect.
cudaError_t LoadDecode();
cudaError_t LaunchDecode(const GatedDeltaArguments& args, cudaStream_t stream);
/// Replaces the convolution's inputs in states, where LaunchRecurrent does not.
cudaError_t LaunchWindows(const GatedDeltaArguments& args, cudaStream_t stream);
/// The gated norm of args.sums.
cudaError_t LaunchGatedNorm(const GatedDeltaArguments& args, cudaStream_t stream);

}  // namespace marlin::cuda
