// The launch of the backend's TransformColumns.
#pragma once

#include "backends/metal/runtime/driver.h"
#include "plan/gemm/transform_columns.h"

namespace marlin::metal {

/// Whether there is a kernel: not for Hadamard blocks that are larger than threadgroup memory, or
/// whose columns also move.
bool TakesTransform(const TransformColumnsCall& call);

/// Precondition: TakesTransform, and there are elements.
KernelLaunch TransformLaunch(const TransformColumnsCall& call);

}  // namespace marlin::metal
