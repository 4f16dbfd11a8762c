// Launches of the kernels of Mamba2.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/recurrent/mamba2/ssd_layout.h"

namespace marlin::cuda {

/// The recurrence row by row, to args.sums. `vector`: states are read 16 bytes at a time.
cudaError_t LoadMamba2();
cudaError_t LaunchMamba2(const Mamba2Arguments& args, bool vector, cudaStream_t stream);

/// The parts of a turn's chunks; begins their rows' args.sums. `shared_bytes`, here and below: what
/// a CTA may have; results do not depend on it.
cudaError_t LoadSsdLocal();
cudaError_t LaunchSsdLocal(const SsdArguments& turn, int shared_bytes, cudaStream_t stream);

/// Runs every sequence through its chunks of a turn.
cudaError_t LoadSsdScan();
cudaError_t LaunchSsdScan(const SsdArguments& turn, int shared_bytes, cudaStream_t stream);

/// Gates and norms of args.sums, and the convolution's inputs in states. Comes last.
cudaError_t LoadMamba2Finish();
cudaError_t LaunchMamba2Finish(const Mamba2Arguments& args, cudaStream_t stream);

}  // namespace marlin::cuda
