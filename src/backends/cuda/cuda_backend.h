// The CUDA backend: NVIDIA GPUs as devices.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "plan/gemm/backend.h"

namespace marlin::cuda {

/// Number of devices that the driver reports; 0 without a driver and in builds without CUDA.
int DeviceCount();

/// Opens "cuda" (the calling thread's current device) or "cuda:N". Errors: kInvalidArgument for a
/// malformed name, kUnsupported with the reason for a device that is absent or too old.
Result<std::unique_ptr<Backend>> OpenCuda(std::string_view name);

/// Facts about this build, and the version of CUDA that the driver is for.
struct CudaBuild {
  std::string codes;  ///< As BuiltCodes(); empty in builds without CUDA.
  int runtime = 0;    ///< The build's version of CUDA, 12040 for 12.4; 0 without CUDA.
  int driver = 0;     ///< The latest version that the driver runs; 0 without a driver.
  /// Names of the formats that a build with CUDA has no kernels for (MARLIN_CUDA_KINDS).
  std::vector<std::string> lacking = {};
};
CudaBuild GetCudaBuild();

}  // namespace marlin::cuda
