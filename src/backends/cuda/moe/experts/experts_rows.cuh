// Reading the rows that the experts' GEMMs multiply: gathered by token, or the gated activation of
// gates and ups.
#pragma once

#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/common/fragment_math.cuh"
#include "backends/cuda/moe/experts/experts_layout.h"

namespace marlin::cuda {

MARLIN_DEVICE bool IsAligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

/// Elements `first` to first + 7 of the rows, of which the last ones may be zeros.
MARLIN_DEVICE void LoadEight(const ExpertRows& rows, int64_t first, int count, float (&values)[8]) {
  const float* const from = static_cast<const float*>(rows.data) + first;
  if (rows.type == Element::kF32 && count >= 8 && IsAligned16(from)) {
    const float4 low = reinterpret_cast<const float4*>(from)[0];
    const float4 high = reinterpret_cast<const float4*>(from)[1];
    values[0] = low.x;
    values[1] = low.y;
    values[2] = low.z;
    values[3] = low.w;
    values[4] = high.x;
    values[5] = high.y;
    values[6] = high.z;
    values[7] = high.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] = i < count ? LoadFloat(rows.data, rows.type, first + i) : 0.0f;
  }
}

/// Elements k to k + 7 of a slot's gated row; zeros from element `columns` on.
MARLIN_DEVICE void LoadEightGated(const ExpertRows& rows, int slot, int columns, int k,
                                  float (&values)[8]) {
  const int64_t first = slot * rows.stride + k;
  LoadEight(rows, first, columns - k, values);
  float ups[8];
  LoadEight(rows, first + columns, columns - k, ups);
  ReplaceByProducts<false>(rows.gate, values, ups);
}

template <typename T>
MARLIN_DEVICE uint4 PackEight(const float (&values)[8]) {
  return {T::Pack(values[0], values[1]), T::Pack(values[2], values[3]),
          T::Pack(values[4], values[5]), T::Pack(values[6], values[7])};
}

/// Elements `first` to first + 7 of the rows, not gated, as operands; zeros from `count` on.
template <typename T>
MARLIN_DEVICE uint4 LoadOperands(const ExpertRows& rows, int64_t first, int count) {
  if (rows.type == (T::kIsBf16 ? Element::kBf16 : Element::kF16) && count >= 8) {
    const auto* const from = static_cast<const uint16_t*>(rows.data) + first;
    if (IsAligned16(from)) return *reinterpret_cast<const uint4*>(from);
  }
  float values[8];
  LoadEight(rows, first, count, values);
  return PackEight<T>(values);
}

/// Elements k to k + 7 of a slot's row as operands; zeros from element `columns` on. `token`:
/// SlotsView::token.
template <typename T>
MARLIN_DEVICE uint4 LoadEightOfRow(const ExpertRows& rows, const int* token, int slot, int columns,
                                   int k) {
  if (!rows.gated) return LoadOperands<T>(rows, token[slot] * rows.stride + k, columns - k);
  float values[8];
  LoadEightGated(rows, slot, columns, k, values);
  return PackEight<T>(values);
}

}  // namespace marlin::cuda
