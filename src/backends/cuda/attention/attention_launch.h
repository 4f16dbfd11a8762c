// The launches of the attention kernels. Run of AttentionCall and PagedAttentionCall chooses one.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/attention/attention_layout.h"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

/// Each Load prepares the kernels of the launch below it.
cudaError_t LoadAttention();
/// In fp32, over tensors or any cache.
cudaError_t LaunchAttention(const AttentionArguments& args, const DeviceShape& device,
                            cudaStream_t stream);

/// On matrix units, for few tokens of a sequence. Preconditions: a bf16 or e4m3 cache with values
/// of its own, aligned to 16 bytes; heads of multiples of 16 features, up to kMostMatrixFeatures.
cudaError_t LoadDecodeAttention();
cudaError_t LaunchDecodeAttention(const AttentionArguments& args, const DeviceShape& device,
                                  cudaStream_t stream);
/// The same for many tokens, with heads of up to kMostTileFeatures: on wgmma ...
cudaError_t LoadPrefillAttention();
cudaError_t LaunchPrefillAttention(const AttentionArguments& args, cudaStream_t stream);
/// ... and on mma.sync, in tiles of the device.
cudaError_t LoadMmaAttention();
cudaError_t LaunchMmaAttention(const AttentionArguments& args, const DeviceShape& device,
                               cudaStream_t stream);

/// On matrix units. Preconditions: a bf16 or e4m3 cache aligned to 16 bytes; keys and values of
/// multiples of 16 features, up to kMostLatent*Features. Values in the keys: no softcap. Others:
/// keys of up to kMostMatrixFeatures, values no wider than keys.
cudaError_t LoadLatentAttention();
cudaError_t LaunchLatentAttention(const AttentionArguments& args, const DeviceShape& device,
                                  cudaStream_t stream);

}  // namespace marlin::cuda
