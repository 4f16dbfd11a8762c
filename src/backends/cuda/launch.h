// The kernels as host functions. Every one puts its work on a stream and returns CUDA's answer to
// the launch; nothing here allocates or waits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/device_views.h"
#include "backends/cuda/tile_layout.h"

namespace marlin::cuda {

// Plans are not for kernels, which this is included by too.
struct GemvPlan;
struct WgmmaPlan;
struct Fp8Plan;

/// A product on tiles; activations are of the matrix unit's type, their rows at multiples of 16
/// bytes.
struct TileGemm {
  TileView weights;
  CodeKind kind = CodeKind::kFp4;
  ActivationView a;
  EpilogueView epilogue;      ///< Multiplier set; see LaunchGemv.
  bool bf16 = true;           ///< The type of the matrix unit's operands.
  float* partials = nullptr;  ///< [splits, m, n], where the plan has splits or gates lie apart.
  /// Words of all ones (MeetingMemory), where the plan has blocks that meet in memory:
  /// MeetingBytes, or StreamTicketBytes. Null: a kernel of its own adds the partials, or makes
  /// tickets ready.
  uint32_t* meeting = nullptr;
  bool overlap_previous = false;
};

/// Canonical words to tiles, one expert.
struct PackJob {
  CanonicalView from;
  TileView to;
  CodeKind kind = CodeKind::kFp4;
  uint8_t* tiles = nullptr;
  float scale_factor = 1;  ///< Power of two that normalises scales and biases.
};
cudaError_t LaunchPackTiles(const PackJob& job, cudaStream_t stream);

/// W in fp32 arithmetic, each weight rounded once.
cudaError_t LaunchDequantizeTiles(const TileView& weights, CodeKind kind, const DenseView& out,
                                  cudaStream_t stream);
cudaError_t LaunchDequantizeCanonical(const CanonicalView& weights, const DenseView& out,
                                      cudaStream_t stream);

/// W^T as a matrix unit's operands: 16-bit rows [n to whole blocks of 128][k to whole tiles].
cudaError_t LaunchDenseRows(const TileView& weights, CodeKind kind, bool bf16, void* out,
                            cudaStream_t stream);

/// fp32 products of fp32 weights and activations, any layout.
struct ExactProduct {
  ActivationView a;
  EpilogueView epilogue;
  bool overlap_previous = false;
};
cudaError_t LaunchExactTiles(const TileView& weights, CodeKind kind, const ExactProduct& product,
                             cudaStream_t stream);
cudaError_t LaunchExactCanonical(const CanonicalView& weights, CodeKind kind,
                                 const ExactProduct& product, cudaStream_t stream);

/// Which of the kernels of a kind of codes these weights need.
ParameterUse UseOf(const TileView& view, CodeKind kind);

/// Copies activations to rows of `k_padded` elements of bf16 or fp16, rounded, zeros behind k.
cudaError_t LaunchStageActivations(const ActivationView& a, void* out, int k_padded, bool bf16,
                                   cudaStream_t stream);

/// A power of two and `columns` (a multiple of 128) e4m3 numbers for every row: fp8_quantize.cu.
cudaError_t LaunchQuantizeRows(const ActivationView& a, void* out, int columns, float* scales,
                               cudaStream_t stream);

/// out = epilogue(partials[0] + partials[1] + ...), in that order; partials are [splits, m, n].
cudaError_t LaunchReducePartials(const float* partials, int splits, int m,
                                 const EpilogueView& epilogue, bool chained, cudaStream_t stream);

/// Products on tiles as planned, and the sums of splits. Errors of the tensor map come back as
/// cudaErrorInvalidValue.
cudaError_t LaunchGemv(const TileGemm& gemm, const GemvPlan& plan, cudaStream_t stream);
/// Clusters of `blocks` thread blocks, each with a multiprocessor of its own, that run at once on
/// the current device; 0 where it cannot be found out.
int CountClusters(int blocks);

cudaError_t LaunchWgmma(const TileGemm& gemm, const WgmmaPlan& plan, cudaStream_t stream);

/// A product of rows quantized by LaunchQuantizeRows, which comes just before on the stream: of
/// `gemm.a` data and stride are those of the quantized rows.
cudaError_t LaunchFp8(const TileGemm& gemm, const float* row_scales, const Fp8Plan& plan,
                      cudaStream_t stream);

}  // namespace marlin::cuda
