// Start-up check: every kernel runs one small GEMM whose result is compared with the host's, so
// that a new GPU or a new Metal compiler is not used unverified.
#pragma once

#include "plan/backend.h"

namespace marlin::metal {

/// Runs a GEMM of integers, whose sums are exact in any order, on each kernel that the device
/// supports. Errors: kUnsupported with the kernel and the first wrong output; those of the backend.
Status CheckKernels(const Backend& backend);

}  // namespace marlin::metal
