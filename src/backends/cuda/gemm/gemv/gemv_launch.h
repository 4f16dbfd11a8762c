// Device properties that are queried with the GEMV kernel.
#pragma once

#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

/// Clusters of `blocks` CTAs, each CTA on a multiprocessor of its own, that run at once on the
/// current device; 0 where the query fails.
int CountClusters(int blocks, const DeviceShape& device);

}  // namespace marlin::cuda
