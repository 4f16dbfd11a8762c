// Start-up check: GEMM kernels run one small GEMM, expert kernels a small layer and routers a few
// tokens. The results are compared with the host's, so that a new GPU or a new Metal compiler is
// not used unverified.
#pragma once

#include "plan/gemm/backend.h"

namespace marlin::metal {

/// Runs a GEMM of integers, whose sums are exact in any order, on each kernel that the device
/// supports, then a layer of experts, then routers. Precondition: the device shares the host's
/// memory. Errors: kUnsupported with the kernel and the first wrong output; errors of the backend.
Status CheckKernels(const Backend& backend);

}  // namespace marlin::metal
