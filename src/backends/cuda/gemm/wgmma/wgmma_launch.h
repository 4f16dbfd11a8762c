// Device properties that are queried with the WGMMA kernel.
#pragma once

namespace marlin::cuda {

/// Clusters of `blocks` CTAs, each CTA on a multiprocessor of its own, that run at once on the
/// current device; 0 where the query fails.
int CountClusters(int blocks);

}  // namespace marlin::cuda
