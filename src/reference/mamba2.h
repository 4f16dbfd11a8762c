// Double-precision reference of Mamba2.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/recurrent.h"

namespace marlin::reference {

/// The results [rows.size(), heads, head_dim] of one sequence, whose rows of the inputs are `rows`.
/// Replaces its state, in the layout of Mamba2Sizes; zeros at its begin.
std::vector<double> Mamba2(const Mamba2Inputs& inputs, const Mamba2Weights& weights,
                           std::span<const int64_t> rows, std::vector<double>* state);

}  // namespace marlin::reference
