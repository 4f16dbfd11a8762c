// The operands of the kernels on tiles, and the launches before and after them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// A GEMM on tiles; activations are of the matrix unit's type, their rows at multiples of 16
/// bytes.
struct TileGemm {
  TileView weights;
  CodeKind kind = CodeKind::kFp4;
  ActivationView a;
  EpilogueView epilogue;      ///< Its multiplier undoes the scaling of the operands.
  bool bf16 = true;           ///< The type of the matrix unit's operands.
  float* partials = nullptr;  ///< The workspace behind staged activations.
  bool overlap_previous = false;
};

/// Which of the kernels of a kind of codes these weights need.
ParameterUse UseOf(const TileView& view, CodeKind kind);

/// Copies activations to rows of `k_padded` elements of bf16 or fp16, rounded, zeros behind k.
cudaError_t LaunchStageActivations(const ActivationView& a, void* out, int k_padded, bool bf16,
                                   cudaStream_t stream);

/// out = epilogue(partials[0] + partials[1] + ...), in that order; partials are [splits, m, n].
cudaError_t LaunchReducePartials(const float* partials, int splits, int m,
                                 const EpilogueView& epilogue, bool chained, cudaStream_t stream);

/// LaunchReducePartials of a GEMM's partial sums, unless the launch before it failed.
cudaError_t AddPartials(const TileGemm& gemm, int splits, cudaError_t launched,
                        cudaStream_t stream);

}  // namespace marlin::cuda
