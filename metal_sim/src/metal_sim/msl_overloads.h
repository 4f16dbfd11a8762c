// Overloads by address space, which a host does not have. Knows nothing of kernels.
#pragma once

#include <string>
#include <string_view>

#include "metal_sim/status.h"

namespace metal_sim {

/// `preprocessed` with only the first of functions that differ in nothing but the address spaces of
/// their parameters or, after the parameters of a member, of the object; and without the latter.
/// Removed text becomes spaces, so that everything else stays in place. Errors: of MslSource.
Result<std::string> MergeOverloads(std::string_view preprocessed);

}  // namespace metal_sim
