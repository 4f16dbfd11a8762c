// Work that a CUDA graph launches again.
#pragma once

#include <functional>
#include <memory>

#include "backends/cuda/runtime/device_memory.h"
#include "plan/gemm/backend.h"

namespace marlin::cuda {

/// Runs `enqueue` on a stream of the recording, waits, and captures it. Errors: from `enqueue`
/// and from the device. Null: the work cannot be captured; it has been done.
Result<std::unique_ptr<RecordedWork>> RecordGraph(
    const std::shared_ptr<DeviceHandle>& device,
    const std::function<Status(void* stream)>& enqueue);

}  // namespace marlin::cuda
