// Rows of bf16 numbers in shared memory without padding: unit u of 16 bytes of row r is at
// u ^ (r & 7), so that ldmatrix has no bank conflicts. A row has a multiple of 8 units.
#pragma once

#include "backends/cuda/attention/attention_layout.h"
#include "backends/cuda/attention/cache_codes.cuh"
#include "backends/cuda/attention/exact/softmax_rows.cuh"
#include "backends/cuda/common/async_copy.cuh"

namespace marlin::cuda {

inline constexpr int kUnit = 16;  ///< Bytes of a unit.

/// The address of a unit.
MARLIN_DEVICE uint32_t UnitAt(uint32_t rows, int row_bytes, int row, int unit) {
  return rows + row * row_bytes + ((unit ^ (row & 7)) * kUnit);
}

/// Requests contiguous rows of `units` units by all threads of a CTA; zeros for rows outside of
/// `seen`, for which `anywhere` is a valid address. kSwizzled: to swizzled rows, `row_bytes` apart,
/// else as they are.
template <int kThreads, int kRows, bool kSwizzled>
MARLIN_DEVICE void CopyRows(const uint8_t* from, const uint8_t* anywhere, const KeySpan& seen,
                            int units, uint32_t to, int row_bytes) {
  const int row_step = kThreads / units;
  const int unit_step = kThreads % units;
  int row = static_cast<int>(threadIdx.x) / units;
  int unit = static_cast<int>(threadIdx.x) % units;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kRows * units; i += kThreads) {
    const bool copied = row >= seen.first && row < seen.end;
    CopyAsync16(kSwizzled ? UnitAt(to, row_bytes, row, unit) : to + i * kUnit,
                copied ? from + static_cast<int64_t>(i) * kUnit : anywhere, copied ? kUnit : 0);
    row += row_step;
    unit += unit_step;
    if (unit >= units) {
      unit -= units;
      ++row;
    }
  }
}

/// Widens contiguous rows of codes to swizzled rows of bf16 numbers by all threads of a CTA.
template <int kThreads, int kRows>
MARLIN_DEVICE void WidenToSwizzled(uint32_t codes, int features, uint32_t to, int row_bytes) {
  const int units = features / 8;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kRows * units; i += kThreads) {
    const uint4 wide = WidenCodes(LoadShared8(codes + i * 8));
    StoreShared16(UnitAt(to, row_bytes, i / units, i % units), wide);
  }
}

/// Whether the units `thread`, `thread + kThreads`, ... of kRows rows are finite.
template <int kThreads, int kRows>
MARLIN_DEVICE bool UnitsAreFinite(uint32_t rows, int row_bytes, int features, int thread) {
  const int units = features / 8;
  bool finite = true;
#pragma unroll 1
  for (int i = thread; i < kRows * units; i += kThreads) {
    finite = AndFinite(finite, LoadShared16(UnitAt(rows, row_bytes, i / units, i % units)));
  }
  return finite;
}

}  // namespace marlin::cuda
