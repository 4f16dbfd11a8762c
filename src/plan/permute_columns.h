// Moving columns of a matrix to and from the order of weights with a permutation along k.
#pragma once

#include <cstdint>

#include "marlin/tensor.h"

namespace marlin {

/// to[r, c] = from[r, permutation[c]], or with `scatter` to[r, permutation[c]] = from[r, c]. Two
/// views of one shape and one type of 2 or 4 bytes, any strides that are not negative; all is
/// device memory.
struct PermuteColumnsCall {
  TensorView from;
  MutableTensorView to;
  const int32_t* permutation = nullptr;  ///< [columns], every column once.
  bool scatter = false;
};

/// Does rows [first, first + count) of a call whose memory is the host's.
void PermuteRows(const PermuteColumnsCall& call, int64_t first, int64_t count);

}  // namespace marlin
