// The launches of a batch: products of one plan whose matrices are the grid's z.
#pragma once

#include <cstdint>
#include <span>

#include "backends/metal/gemm/product_launches.h"
#include "backends/metal/plan/launch_plan.h"

namespace marlin::metal {

/// The most calls of a batch that one launch takes; 1: the plan's kernels take no batch.
int64_t MostMatricesOf(const LaunchPlan& plan, const GemmDesc& desc);

/// The launches of such calls, as PlannedGemm::RunBatch has them: LaunchesOf for all of them. Their
/// workspace holds the partials of each.
GemmLaunches BatchLaunchesOf(const LaunchPlan& plan, std::span<const GemmCall> calls);

}  // namespace marlin::metal
