// The CPU backend.
#pragma once

#include <memory>

#include "base/thread_pool.h"
#include "plan/gemm/backend.h"

namespace marlin::cpu {

/// Opens the CPU at the best supported level, or at the one that METAL_MARLIN_CPU names. Errors:
/// kInvalidArgument for an unknown level, kUnsupported for one that this machine does not offer.
Result<std::unique_ptr<Backend>> OpenCpu(const DeviceOptions& options);

}  // namespace marlin::cpu
