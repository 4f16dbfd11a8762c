// Products of rows with a matrix of their head.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/decoder/decoder_layout.h"

namespace marlin::cuda {

/// out[t, h, j] = x[t, h] . weights[h, j].
struct HeadProductArguments {
  RowsView x;        ///< [tokens, heads] rows.
  RowsView weights;  ///< [heads, outputs] rows.
  RowsView out;      ///< [tokens, heads] rows.
  int64_t tokens = 0;
  int heads = 0;
  int inputs = 0;
  int outputs = 0;
};

/// In fp32; a row's bits do not depend on the others.
cudaError_t LaunchHeadProduct(const HeadProductArguments& args, cudaStream_t stream);

/// Inputs that a step of LaunchMatrixHeadProduct takes.
inline constexpr int kHeadProductInputs = 32;
/// On matrix units. Preconditions: f32 x and bf16 weights whose rows are aligned to 16 bytes,
/// inputs a multiple of kHeadProductInputs.
cudaError_t LaunchMatrixHeadProduct(const HeadProductArguments& args, cudaStream_t stream);

}  // namespace marlin::cuda
