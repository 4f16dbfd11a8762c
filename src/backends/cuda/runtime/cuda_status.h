// CUDA errors as Status, and the latch that keeps a lost device lost.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <string>

#include "marlin/status.h"

namespace marlin::cuda {

/// Remembers the first sticky error, after which the device is unusable.
class ErrorLatch {
 public:
  /// kOutOfMemory for failed allocations, kDeviceLost (from then on for every call) for CUDA's
  /// sticky errors, kInternal for a launch that CUDA refused. `what` names the call.
  Status Check(cudaError_t error, const char* what);
  /// Ok, or kDeviceLost.
  Status Lost() const;

 private:
  std::atomic<cudaError_t> lost_{cudaSuccess};
};

}  // namespace marlin::cuda
