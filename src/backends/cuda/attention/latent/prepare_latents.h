// The launch that prepares a few rows for latent attention.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/layout/value_record.h"

namespace marlin::cuda {

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

cudaError_t LoadPrepareLatents();
/// Rotates queries and latents, and appends the latents to the pages of their positions.
cudaError_t LaunchPrepareLatents(const PrepareLatentsArguments& args, cudaStream_t stream);

}  // namespace marlin::cuda
