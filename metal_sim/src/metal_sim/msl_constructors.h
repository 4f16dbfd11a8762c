// Constructors of vectors for a compiler that has vectors and no such constructors (clang's OpenCL
// C++, which checks address spaces). Knows nothing of the values.
#pragma once

#include "metal_sim/msl_source.h"

namespace metal_sim {

/// `half4(x)` becomes `::metal_sim::Make<half4>(x)`, which converts or repeats x, and `half4(x, y)`
/// the literal `((half4)(x, y))`. Types are known as VectorNames knows them.
void RewriteConstructors(MslSource& source);

}  // namespace metal_sim
