// The layers of a decode step as one launch of the persistent kernel.
#pragma once

#include <memory>
#include <span>

#include "backends/cuda/plan/tile_problem.h"
#include "backends/cuda/runtime/device_memory.h"
#include "backends/cuda/runtime/value_errors.h"
#include "plan/step/decoder_step.h"

namespace marlin::cuda {

/// Fuses all layers of a step, if the persistent kernel runs them: the default accuracy and
/// determinism, attention over a bf16 cache with heads of up to 128 features, no norms behind
/// blocks, no shared experts, and all weights in tiles of one kind of codes. Else the run is empty.
/// The run takes steps of one row. `device` and `errors` outlive it. Errors: kOutOfMemory,
/// kDeviceLost.
Result<FusedRun> FusePersistent(const std::shared_ptr<DeviceHandle>& device,
                                const ValueErrors& errors, const DeviceShape& shape,
                                const StepDescription& step,
                                std::span<const StepOperation> operations);

}  // namespace marlin::cuda
