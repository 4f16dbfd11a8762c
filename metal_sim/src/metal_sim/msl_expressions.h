// Expressions that mean something else in Metal than in C++. Knows nothing of declarations but
// `auto`.
#pragma once

#include "metal_sim/msl_rewriter.h"
#include "metal_sim/msl_source.h"

namespace metal_sim {

/// Rewrites suffixes of literals (1.0H, 1.0bf, 1.0BF) for either purpose, and to be run also
/// literals without one, lists in braces that vectors begin with, and shifts, divisions and
/// `auto x = ...` in functions, as shim/msl_operator.h describes.
void RewriteExpressions(MslSource& source, RewritePurpose purpose);

}  // namespace metal_sim
