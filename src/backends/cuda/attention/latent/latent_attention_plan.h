// Plans the launch of latent attention.
#pragma once

#include "backends/cuda/attention/attention_plan.h"

namespace marlin::cuda {

/// Tiles of 16 or 32 query rows of a sequence, and at least one part of their keys: as many as
/// occupy the device. The sums depend on the plan.
AttentionPlan PlanLatentAttention(const AttentionShape& shape, int multiprocessors);

}  // namespace marlin::cuda
