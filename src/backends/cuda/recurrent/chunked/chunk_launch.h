// Launches of the chunked gated delta rule.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/recurrent/chunked/chunk_layout.h"

namespace marlin::cuda {

/// The parts of a turn's chunks.
cudaError_t LoadChunkLocal();
cudaError_t LaunchChunkLocal(const ChunkArguments& turn, cudaStream_t stream);

/// Runs every sequence through its chunks of a turn. `shared_bytes`: what a CTA may have; results
/// do not depend on it.
cudaError_t LoadChunkScan();
cudaError_t LaunchChunkScan(const ChunkArguments& turn, int shared_bytes, cudaStream_t stream);

}  // namespace marlin::cuda
