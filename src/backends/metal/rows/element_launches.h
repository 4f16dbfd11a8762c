// The launch of the backend's addition of rows.
#pragma once

#include "backends/metal/runtime/driver.h"
#include "plan/gemm/host_staging.h"

namespace marlin::metal {

/// Precondition: tokens and width are not 0.
KernelLaunch AddRowsLaunch(const AddRowsCall& call);

}  // namespace marlin::metal
