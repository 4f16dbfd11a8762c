// Launches of kernels as a chain (PDL): each may begin while the previous one ends.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/launch.h"

namespace marlin::cuda {

/// The first statement of a kernel of the chain. The next kernel begins after this one has waited,
/// so that its own copies do not delay this one's loads.
MARLIN_DEVICE void EnterChain() {
  WaitForEarlierWork();
  TriggerDependentLaunch();
}

}  // namespace marlin::cuda
