// Marks in the work of a stream as CUDA events.
#pragma once

#include <memory>

#include "backends/cuda/runtime/device_memory.h"
#include "plan/gemm/backend.h"

namespace marlin::cuda {

/// Backend::MakeMarks. `holds`: the stream waits after the first mark until Take, or until the
/// host has waited for so long that it may be waiting for this very work.
std::unique_ptr<StreamMarks> MakeEventMarks(const std::shared_ptr<DeviceHandle>& device,
                                            void* stream, bool holds);

}  // namespace marlin::cuda
