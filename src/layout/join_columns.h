// Concatenates weights along n.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// Columns first, first + step, ... of every expert of a set of weights.
struct WeightColumns {
  const QuantizedWeights* weights;
  int64_t first = 0;
  int64_t step = 1;
  int64_t count = 0;
};

/// True when weights differ only in n and their contents: same format, grouping, scale type, global
/// scale, codebook, sparsity, permutation and input transform.
bool CanJoinColumns(const QuantizedWeights& a, const QuantizedWeights& b);

/// Copies the columns into new weights, part after part. Codes of unquantized formats may be
/// transposed, [1, k, n] with strides {k * n, 1, k}, as linear layers are stored. Preconditions: at
/// least one part, the parts can be joined, and their columns exist. Errors: kOutOfMemory.
Result<QuantizedWeights> JoinColumns(std::span<const WeightColumns> parts);

}  // namespace marlin
