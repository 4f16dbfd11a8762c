// Cholesky factorizations on a CUDA device, by cuSOLVER.
#pragma once

#include <memory>

#include "backends/cuda/runtime/device_memory.h"
#include "base/cholesky.h"

namespace marlin::cuda {

/// Errors: kUnsupported where cuSOLVER is not installed, kDeviceLost.
Result<std::unique_ptr<Cholesky>> MakeDeviceCholesky(std::shared_ptr<DeviceHandle> device);

}  // namespace marlin::cuda
