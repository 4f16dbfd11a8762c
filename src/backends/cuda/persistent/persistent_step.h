// The layers of a decode step as one launch of the persistent kernel.
#pragma once

#include <span>

#include "backends/cuda/persistent/persistent_pool.h"
#include "backends/cuda/plan/tile_problem.h"
#include "backends/cuda/runtime/value_errors.h"
#include "plan/step/decoder_step.h"

namespace marlin::cuda {

/// Fuses the layers that `operations` begins with, up to the head of the model or to a mixer that
/// runs elsewhere, if the persistent kernel runs all of them; if not, the run is empty and says why
/// (SupportsLayer, PersistentDescription). The run takes steps of up to eight rows. `errors`
/// outlives it. Precondition: `operations` is not empty. Errors: kOutOfMemory, kDeviceLost.
Result<FusedRun> FusePersistent(PersistentPool& pool, const ValueErrors& errors,
                                const DeviceShape& shape, const StepDescription& step,
                                std::span<const StepOperation> operations);

/// The same for what such a run does not take: several rows of a model with gated delta nets, whose
/// mixers then run elsewhere.
Result<FusedRun> FuseWithin(PersistentPool& pool, const ValueErrors& errors,
                            const DeviceShape& shape, const StepDescription& step,
                            std::span<const StepOperation> operations);

}  // namespace marlin::cuda
