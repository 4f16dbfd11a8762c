// Vectors of row indices and positions in host-readable memory.
#pragma once

#include <cstdint>

#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// Positions of tokens are below this.
inline constexpr int64_t kPositionLimit = int64_t{1} << 31;

/// Element i of a contiguous vector of i32 or i64.
inline int64_t IndexAt(const TensorView& indices, int64_t i) {
  return indices.dtype() == DType::kI64 ? indices.As<int64_t>()[i]
                                        : int64_t{indices.As<int32_t>()[i]};
}

/// The error of an index, the one at `at`, that is negative or not below `limit`.
Status WrongIndex(const char* name, int64_t index, int64_t at, int64_t limit);

/// Errors: WrongIndex of the first one.
Status CheckIndices(const char* name, const TensorView& indices, int64_t limit);

/// Checks that first_rows, i32 [sequences + 1], ascend from 0 to `rows`. Errors: kInvalidArgument.
Status CheckFirstRows(const TensorView& first_rows, int64_t rows);

}  // namespace marlin
