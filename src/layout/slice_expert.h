// Extracts one expert of stacked weights.
#pragma once

#include <cstdint>

#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// Views of one expert's parts. A part that does not begin at a multiple of 4 bytes within the
/// stack, which QuantizedWeights guarantees, is copied; the result's owner holds the copies and the
/// stack's owner. Precondition: weights that Validate accepts, 0 <= expert < spec.experts. Errors:
/// kOutOfMemory.
Result<QuantizedWeights> SliceExpert(const QuantizedWeights& stack, int64_t expert);

}  // namespace marlin
