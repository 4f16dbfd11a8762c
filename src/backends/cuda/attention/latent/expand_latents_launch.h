// The launches of the kernels of ExpandLatents.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/layout/value_record.h"

namespace marlin::cuda {

/// Features of latents, keys without RoPE and values on matrix units are multiples.
inline constexpr int kExpandedFeatures = 64;

struct ExpandLatentsArguments {
  PagesView latents;
  SequencesView sequences;  ///< One, whose block table is the pages of latents.
  const int32_t* tokens = nullptr;
  RowsView key_weights;    ///< [heads, features of a latent] rows of the key features without RoPE.
  RowsView value_weights;  ///< [heads, value_dim] rows of the features of a latent.
  int nope = 0;            ///< Key features without RoPE.
  int heads = 1;
  int key_dim = 0;
  int value_dim = 0;
  Element out_type = Element::kF32;
  uint8_t* out = nullptr;  ///< Page 0: keys, then values, as in PagedCache.
  int64_t page_stride = 0;
  ErrorView errors;
};

cudaError_t LoadExpandLatents();
/// In fp32.
cudaError_t LaunchExpandLatents(const ExpandLatentsArguments& args, cudaStream_t stream);
/// On matrix units. Preconditions: bf16 or e4m3 with weights and results in bf16, in multiples of
/// kExpandedFeatures, rows of all aligned to 16 bytes.
cudaError_t LaunchMatrixExpandLatents(const ExpandLatentsArguments& args, cudaStream_t stream);

}  // namespace marlin::cuda
