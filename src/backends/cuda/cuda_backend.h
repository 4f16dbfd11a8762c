// The CUDA backend: NVIDIA GPUs as devices.
#pragma once

#include <memory>
#include <string_view>

#include "plan/gemm/backend.h"

namespace marlin::cuda {

/// Number of devices that the driver reports; 0 without a driver and in builds without CUDA.
int DeviceCount();

/// Opens "cuda" (the calling thread's current device) or "cuda:N". Errors: kInvalidArgument for a
/// malformed name, kUnsupported with the reason for a device that is absent or too old.
Result<std::unique_ptr<Backend>> OpenCuda(std::string_view name);

}  // namespace marlin::cuda
