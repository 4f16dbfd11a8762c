// The cuBLAS handle of a device.
#pragma once

#include <memory>
#include <mutex>

#include "backends/cuda/libraries/cublas_library.h"

namespace marlin::cuda {

/// Makes the handle on first use. Thread-safe.
class CublasHandle {
 public:
  /// The handle for the calling thread's current device. Errors: as for Cublas::Make.
  Result<std::shared_ptr<const Cublas>> Get();

 private:
  std::mutex mutex_;
  std::shared_ptr<const Cublas> handle_;
};

}  // namespace marlin::cuda
