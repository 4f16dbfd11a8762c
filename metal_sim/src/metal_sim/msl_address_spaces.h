// Pointers that name no address space, and words, which Metal refuses and compilers for hosts take.
// Knows nothing of the targets of pointers.
#pragma once

#include <string>
#include <vector>

#include "metal_sim/msl_source.h"

namespace metal_sim {

/// "file.metal:12: ..." for every pointer and reference without an address space among the
/// parameters of functions with bodies and among variables of scalar and vector types.
std::vector<std::string> FindPointersWithoutSpace(const MslSource& source);

/// "file.metal:12: ..." for every word of C++ that Metal does not have.
std::vector<std::string> FindRefusedWords(const MslSource& source);

}  // namespace metal_sim
