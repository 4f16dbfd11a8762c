// Extracts consecutive k of weights.
#pragma once

#include <cstdint>

#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// The largest number of which a slice's first k must be a multiple: groups and words stay whole.
int64_t SliceGranule(const WeightsSpec& spec);

/// Rows [first_k, first_k + count) of every matrix. Copies. Precondition: weights that Validate
/// accepts, without a permutation or Hadamard blocks; first_k is a multiple of SliceGranule, and so
/// is count unless the slice ends at k. Errors: kOutOfMemory.
Result<QuantizedWeights> SliceRows(const QuantizedWeights& weights, int64_t first_k, int64_t count);

}  // namespace marlin
