// Latent attention of a decode step, from the projections to the attention's results, as one run.
#pragma once

#include <memory>

#include "backends/cuda/plan/tile_problem.h"
#include "backends/cuda/runtime/device_memory.h"
#include "backends/cuda/runtime/split_k_scratch.h"
#include "backends/cuda/runtime/value_errors.h"
#include "plan/step/decoder_step.h"

namespace marlin::cuda {

/// A run of one AttentionStep, if it is latent attention of a step in default accuracy and
/// determinism; otherwise none. It takes steps of up to eight rows, which attend to the latents
/// themselves. All but `step` and `attention` outlive it. Errors: kDeviceLost.
Result<FusedRun> FuseLatentAttention(const std::shared_ptr<DeviceHandle>& device,
                                     const ValueErrors& errors, SplitKScratch& scratch,
                                     const DeviceShape& shape, const StepDescription& step,
                                     const AttentionStep& attention);

}  // namespace marlin::cuda
