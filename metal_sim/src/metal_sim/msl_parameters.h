// Reads the parameters of a kernel: their names and bindings. Owns the names of
// Metal's inputs; knows nothing of how kernels are found.
#pragma once

#include <cstddef>
#include <vector>

#include "metal_sim/msl_rewriter.h"
#include "metal_sim/msl_source.h"

namespace metal_sim {

/// Reads the parameter list whose parentheses are at `open` and at its partner. Buffers without an
/// index get the lowest that is free, in the order of the list.
/// Errors: kInvalidArgument for parameters without a binding, with several, with one that is not
/// known, and for an index that is out of range or used twice.
Result<std::vector<KernelArgument>> ReadParameters(const MslSource& source, size_t open);

}  // namespace metal_sim
