// Operands of the GEMM kernels with tiled weights, and the launches before and after them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// A GEMM with tiled weights; activations have the type of the MMA operands, and their rows begin
/// at multiples of 16 bytes.
struct TileGemm {
  TileView weights;
  CodeKind kind = CodeKind::kFp4;
  ActivationView a;
  EpilogueView epilogue;      ///< Its multiplier undoes the scaling of the operands.
  bool bf16 = true;           ///< MMA operands are bf16, not fp16.
  float* partials = nullptr;  ///< The workspace after the staged activations.
  bool overlap_previous = false;
};

/// Which kernel specialization these weights need.
ParameterUse UseOf(const TileView& view, CodeKind kind);

/// Rounds activations to bf16 or fp16 into rows of `k_padded` elements, with zeros after k.
cudaError_t LaunchStageActivations(const ActivationView& a, void* out, int k_padded, bool bf16,
                                   cudaStream_t stream);

/// out = epilogue(partials[0] + partials[1] + ...), in that order; partials are [splits, m, n].
cudaError_t LaunchReducePartials(const float* partials, int splits, int m,
                                 const EpilogueView& epilogue, bool chained, cudaStream_t stream);

/// Reduces the split-K partials of a GEMM (LaunchReducePartials), unless its launch failed.
cudaError_t AddPartials(const TileGemm& gemm, int splits, cudaError_t launched,
                        cudaStream_t stream);

}  // namespace marlin::cuda
