// Parameters and launch of the kernels with CTA tiles of 64 tokens x 64 outputs, one for each way
// to feed weights to the MMAs; run by name (marlin_gemm_fp4, ...).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/gemm/block/block_plan.h"
#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// Parameters of the kernels.
struct BlockArguments {
  MarlinW4View weights;  ///< The tiled layout uses only `codes`.
  const void* a = nullptr;
  int64_t a_stride = 0;
  EpilogueView epilogue;
  float* partials = nullptr;  ///< [parallel, m, n]; null: the kernel applies the epilogue.
  int m = 0;
  int k = 0;
  BlockPlan plan;
};

/// Kernels with (`extras`) or without zeros and biases.
const void* StagedFunction(BlockKernel kernel, bool bf16, bool extras);
const void* FusedFunction(BlockKernel kernel, CodeKind kind, bool bf16, bool extras);
/// Zeroes the partial sums of units that continue the previous unit of their CTA: the CTA
/// accumulates such units in registers and stores the sum with the first of them.
cudaError_t LaunchZeroReduction(const BlockArguments& args, cudaStream_t stream);

}  // namespace marlin::cuda
