// The launches of a pass of few tokens, without sorting.
#pragma once

#include <vector>

#include "backends/metal/moe/expert_launches.h"
#include "backends/metal/moe/expert_table.h"
#include "backends/metal/moe/expert_tiling.h"

namespace marlin::metal {

/// Whether the selections of a pass are better not sorted, and the matrices allow it. The order of
/// sums is another one than with sorting, so not for batch invariance.
bool IsBestUnsorted(const ExpertPass& pass, const ExpertTable& table);

/// As ExpertLaunches for a pass with PlannedPass::unsorted: gate and up, down with the sum.
std::vector<KernelLaunch> DecodeLaunches(const PlannedPass& planned, const ExpertsProblem& problem,
                                         const LayerExperts& layer, const ExpertTable& table,
                                         const ExpertsCall& call, ErrorWords::Word* error);

}  // namespace marlin::metal
