// Problems with 2:4 weights.
#pragma once

#include <string_view>
#include <vector>

#include "case.h"

namespace marlin::conformance {

/// Appends GEMMs and dequantizations of 2:4 weights: every format that has them, with all patterns,
/// scale types and group sizes, shapes with partial blocks, and the promises of kernels.
void AddSparse(std::string_view backend, std::vector<Case>* cases);

}  // namespace marlin::conformance
