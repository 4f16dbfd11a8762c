// The part of the start-up check that routes (kernel_check.h).
#pragma once

#include "plan/gemm/backend.h"

namespace marlin::metal {

/// Routes a few tokens from logits and from hidden states, and compares them with selections that
/// are known. Precondition: as for CheckKernels. Errors: as CheckKernels.
Status CheckRouters(const Backend& backend);

}  // namespace marlin::metal
