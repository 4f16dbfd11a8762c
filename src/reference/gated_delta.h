// Double-precision reference of GatedDelta.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/recurrent.h"

namespace marlin::reference {

/// The results [rows.size(), value_heads, value_dim] of one sequence, whose rows of the inputs are
/// `rows`. Replaces its state, in the layout of GatedDeltaSizes; zeros at its begin.
std::vector<double> GatedDelta(const GatedDeltaInputs& inputs, const GatedDeltaWeights& weights,
                               const GatedDeltaSizes& sizes, std::span<const int64_t> rows,
                               std::vector<double>* state);

}  // namespace marlin::reference
