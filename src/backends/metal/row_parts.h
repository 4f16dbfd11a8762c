// Products that would keep a GPU for seconds, in parts. The system ends a command buffer that runs
// too long, and with it the device; macOS does not say how long that is, and draws nothing
// meanwhile.
#pragma once

#include <cstdint>

#include "plan/backend.h"

namespace marlin::metal {

/// About a second of the slowest GPU with simdgroup_matrix (M1: 2.6 TFLOP/s by its specification).
inline constexpr int64_t kMostOperationsOfPart = int64_t{1} << 41;

/// How many rows of a product are one part: all of them, or a multiple of 64 rows. m, n, k are not
/// 0.
int64_t RowsOfPart(const GemmDesc& desc);

/// Rows [first, first + rows) of a product, as a product.
GemmCall PartOf(const GemmCall& call, int64_t first, int64_t rows);

}  // namespace marlin::metal
