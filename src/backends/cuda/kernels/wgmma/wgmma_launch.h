// Properties of a device that are asked with the WGMMA kernel.
#pragma once

namespace marlin::cuda {

/// Clusters of `blocks` thread blocks, each with a multiprocessor of its own, that run at once on
/// the current device; 0 where it cannot be found out.
int CountClusters(int blocks);

}  // namespace marlin::cuda
