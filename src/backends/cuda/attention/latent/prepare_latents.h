// Launches that prepare small batches for latent attention.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/decoder/operations.h"
#include "backends/cuda/layout/value_record.h"

namespace marlin::cuda {

inline constexpr int kPrepareThreads = 128;

struct PrepareLatentsArguments {
  RowsView queries;  ///< f32 [rows, heads]: the queries' features for RoPE.
  RowsView wide;     ///< f32 [rows, heads]: where they go.
  RowsView latents;  ///< f32 [rows], as wide as the cache's keys; the last features are for RoPE.
  int heads = 0;
  int rope = 0;  ///< Features for RoPE.
  RotaryView rotary;
  SequencesView sequences;
  PagesView pages;
  ErrorView errors;
};

/// The CTAs of a launch: of every row, its heads' and its latent's.
MARLIN_HOST_DEVICE int PrepareBlocks(const PrepareLatentsArguments& args) {
  constexpr int kWarps = kPrepareThreads / 32;
  return args.sequences.rows * ((args.heads + kWarps - 1) / kWarps + 1);
}

cudaError_t LoadPrepareLatents();
/// Rotates queries and latents, and appends the latents to the pages of their positions.
cudaError_t LaunchPrepareLatents(const PrepareLatentsArguments& args, cudaStream_t stream);

/// The same and a product that neither reads what the other writes, in one launch where the product
/// takes matrix units and small batches.
cudaError_t LoadPreparedProduct();
Status RunPreparedProduct(const HeadProductCall& call, const PrepareLatentsArguments& prepare,
                          const CallContext& context);

}  // namespace marlin::cuda
