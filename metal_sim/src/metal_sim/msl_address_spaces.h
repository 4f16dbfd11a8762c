// Pointers that name no address space, which Metal refuses and compilers for hosts take. Knows
// nothing of their targets.
#pragma once

#include <string>
#include <vector>

#include "metal_sim/msl_source.h"

namespace metal_sim {

/// "file.metal:12: ..." for every pointer and reference without an address space among the
/// parameters of functions with bodies and among variables of scalar and vector types.
std::vector<std::string> FindPointersWithoutSpace(const MslSource& source);

}  // namespace metal_sim
