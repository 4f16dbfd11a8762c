// Finds the kernels of a Metal source: functions, and instantiations of function templates. Owns
// the conditions for a kernel and its name; parameters are msl_parameters.h's.
#pragma once

#include <span>
#include <vector>

#include "metal_sim/msl_declarations.h"
#include "metal_sim/msl_rewriter.h"
#include "metal_sim/msl_source.h"

namespace metal_sim {

/// Collects the kernels among `declarations`, functions first, then explicit instantiations, which
/// are blanked out of the text; each in the order of the text. Declarations without a body are left
/// alone. Errors: kInvalidArgument for two entries of one name, a kernel that returns something,
/// one that is no function at namespace scope, and an instantiation of a template that is no
/// kernel.
Result<std::vector<KernelEntry>> CollectKernels(MslSource& source,
                                                std::span<const Declaration> declarations);

}  // namespace metal_sim
