// Prepare for the loader of models: columns side by side, straight from where they lie.
#pragma once

#include <span>

#include "layout/join_columns.h"
#include "marlin/device.h"
#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// Weights side by side as one matrix on a device, in one copy where the device can. Codes of
/// unquantized formats may lie transposed (join_columns.h). Precondition: the columns can be
/// joined; all but the values of unquantized formats is validated. Errors: kNonFiniteInput for such
/// a value that is NaN or Inf, kUnsupported, kOutOfMemory.
Result<PreparedWeights> PrepareColumns(std::span<const WeightColumns> columns,
                                       const Device& device);

}  // namespace marlin
