// Concatenates weights along n.
#pragma once

#include <algorithm>
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

/// The columns of the joined weights.
inline int64_t CountColumns(std::span<const WeightColumns> parts) {
  int64_t count = 0;
  for (const WeightColumns& part : parts) count += part.count;
  return count;
}

/// An array of QuantizedWeights with a column per output: codes, scales and the like.
using ColumnArray = const TensorView QuantizedWeights::*;

/// A part of an array of the joined weights. The rows of all experts count as one sequence.
struct JoinedWindow {
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t first_column = 0;
  int64_t columns = 0;
};

/// Calls body(part, column) for the columns of each part that lie in the window, in order; `column`
/// is the first one's number in the window.
template <typename Body>
void ForEachPart(std::span<const WeightColumns> parts, const JoinedWindow& window,
                 const Body& body) {
  int64_t begin = 0;  // The part's first column in the joined weights.
  for (WeightColumns part : parts) {
    const int64_t first = std::max(begin, window.first_column);
    const int64_t end = std::min(begin + part.count, window.first_column + window.columns);
    const int64_t before = first - begin;
    begin += part.count;
    if (first >= end) continue;
    part.first += before * part.step;
    part.count = end - first;
    body(part, first - window.first_column);
  }
}

/// Copies a window of an array that all parts have; its rows start `to_stride` elements apart.
void CopyJoined(std::span<const WeightColumns> parts, ColumnArray array, const JoinedWindow& window,
                int64_t to_stride, void* to);

/// Copies the columns into new weights, part after part. Codes of unquantized formats may be
/// transposed, [1, k, n] with strides {k * n, 1, k}, as linear layers are stored. Preconditions: at
/// least one part, the parts can be joined, and their columns exist. Errors: kOutOfMemory.
Result<QuantizedWeights> JoinColumns(std::span<const WeightColumns> parts);

}  // namespace marlin
