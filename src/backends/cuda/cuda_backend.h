// NVIDIA GPUs as devices.
#pragma once

#include <memory>
#include <string_view>

#include "plan/backend.h"

namespace marlin::cuda {

/// Devices that the driver shows; 0 without a driver and in builds without CUDA.
int DeviceCount();

/// Opens "cuda" (the calling thread's current device) or "cuda:N". Errors: kInvalidArgument for a
/// name that is none, kUnsupported for a device that is not there or too old, with the reason.
Result<std::unique_ptr<Backend>> OpenCuda(std::string_view name);

}  // namespace marlin::cuda
