// Double-precision reference of ShortConvolution.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/recurrent.h"

namespace marlin::reference {

/// The results [rows.size(), channels] of one sequence, whose rows of the inputs are `rows`.
/// Replaces its state, in the layout of ShortConvolutionSizes; zeros at its begin.
std::vector<double> ShortConvolution(const ShortConvolutionInputs& inputs,
                                     const ShortConvolutionWeights& weights,
                                     std::span<const int64_t> rows, std::vector<double>* state);

}  // namespace marlin::reference
