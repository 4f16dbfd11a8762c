// Splits GEMMs along m that would occupy the GPU for seconds. macOS aborts command buffers that run
// too long (the limit is undocumented), which loses the device, and the display does not update
// while one runs.
#pragma once

#include <cstdint>

#include "plan/gemm/backend.h"

namespace marlin::metal {

/// About one second on the slowest GPU with simdgroup_matrix (M1: 2.6 TFLOP/s as specified).
inline constexpr int64_t kMostOperationsOfPart = int64_t{1} << 41;

/// The multiplications and additions of a part; at least 1 where m and n are not 0.
int64_t OperationsOf(const GemmDesc& desc);

/// Rows per part: m, or a multiple of 64. m and n are not 0.
int64_t RowsOfPart(const GemmDesc& desc);

}  // namespace marlin::metal
