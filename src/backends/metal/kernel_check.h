// Every kernel on one small product, compared with the host: what a new GPU or a new version of its
// compiler is asked before anything depends on it.
#pragma once

#include "plan/backend.h"

namespace marlin::metal {

/// Runs a product of whole numbers, whose sums are exact in any order, on each kernel that the
/// device can run. Errors: kUnsupported with the kernel and the first wrong number; those of the
/// backend.
Status CheckKernels(const Backend& backend);

}  // namespace marlin::metal
