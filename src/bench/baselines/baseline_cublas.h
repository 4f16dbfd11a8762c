// cuBLAS as a baseline of benchmarks.
#pragma once

#include <memory>
#include <string>

#include "bench/baselines/dense_baseline.h"
#include "marlin/device.h"
#include "marlin/status.h"

namespace marlin::bench {

/// Makes a handle on the calling thread's current device (cublas_library.h says where the library
/// is looked for). The baseline's bf16 GEMM is the one that PyTorch runs. `version` is the version
/// of cuBLAS, such as "13.1.0". Errors: kUnsupported when it is not there, kDeviceLost,
/// kOutOfMemory.
struct CublasBaseline {
  DenseBaseline baseline;
  std::string version;
};
Result<CublasBaseline> LoadCublas(const Device& device);

}  // namespace marlin::bench
