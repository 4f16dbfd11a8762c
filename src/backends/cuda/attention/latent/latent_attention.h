// Attention over a paged cache whose values are in its keys, on matrix units.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/decoder/decoder_layout.h"

namespace marlin::cuda {

/// Features of a key and of a value, at most: the latent of DeepSeek's MLA and its RoPE part.
inline constexpr int kMostLatentKeyFeatures = 576;
inline constexpr int kMostLatentValueFeatures = 512;

/// Call it before the first LaunchLatentAttention.
cudaError_t LoadLatentAttention();
/// Preconditions: a bf16 or e4m3 cache with values in its keys, aligned to 16 bytes; keys and
/// values of multiples of 16 features, up to kMostLatent*Features.
cudaError_t LaunchLatentAttention(const AttentionArguments& args, cudaStream_t stream);

}  // namespace marlin::cuda
