// Quantization of activations to e4m3, row by row.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/layout/device_views.h"

namespace marlin::cuda {

/// Writes a power of two and `columns` (a multiple of 128) e4m3 numbers for every row.
cudaError_t LaunchQuantizeRows(const ActivationView& a, void* out, int columns, float* scales,
                               cudaStream_t stream);

/// Rounds rows to the same numbers as bf16, e4m3 numbers times a power of two for every row, in
/// rows of `columns` (a multiple of 8), with zeros after k.
cudaError_t LaunchRoundRows(const ActivationView& a, void* out, int columns, cudaStream_t stream);

}  // namespace marlin::cuda
