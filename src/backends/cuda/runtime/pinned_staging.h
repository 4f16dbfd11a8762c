// Page-locked host memory with an event.
#pragma once

#include <memory>

#include "backends/cuda/runtime/device_memory.h"
#include "plan/gemm/host_staging.h"

namespace marlin::cuda {

/// Errors: kOutOfMemory naming the size, kDeviceLost.
Result<std::unique_ptr<HostStaging>> MakePinnedStaging(const std::shared_ptr<DeviceHandle>& device,
                                                       int64_t bytes);

}  // namespace marlin::cuda
