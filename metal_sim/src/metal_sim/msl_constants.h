// Function constants and the program-scope constants computed from them. Owns how a value that is
// known only at launch is spelled in C++; knows nothing of kernels.
#pragma once

#include <span>
#include <vector>

#include "metal_sim/msl_declarations.h"
#include "metal_sim/msl_rewriter.h"
#include "metal_sim/msl_source.h"

namespace metal_sim {

/// Rewrites the constants among `declarations`:
///  - `constant T x [[function_constant(3)]];` becomes `extern constant T x; extern constant bool
///    x__defined;` with symbols of their own, so that the compiler takes them for constants of
///    unknown value: it reads them once, and no check is made of that;
///  - `constant T y = x + 1;` becomes `static inline T y__value() { return x + 1; }`, and later
///    uses of `y` become `y__value()`.
/// Constants that no function constant goes into are left alone.
/// Errors: kInvalidArgument for an index that is no number, used twice or on anything but a
/// plain variable, and for a variable that hides a computed constant.
Result<std::vector<ConstantEntry>> RewriteConstants(MslSource& source,
                                                    std::span<const Declaration> declarations);

}  // namespace metal_sim
