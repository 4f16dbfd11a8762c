// Reading the rows that the experts' GEMMs multiply: gathered by token, or the gated activation of
// gates and ups.
#pragma once

#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/common/fragment_math.cuh"
#include "backends/cuda/moe/experts/experts_layout.h"

namespace marlin::cuda {

/// Element k of a slot's row; `token`: SlotsView::token.
MARLIN_DEVICE float LoadRowElement(const ExpertRows& rows, const int* token, int slot, int columns,
                                   int k) {
  if (rows.gated) {
    const float* const row = static_cast<const float*>(rows.data) + slot * rows.stride;
    return GateProduct(rows.gate, row[k], row[columns + k]);
  }
  return LoadFloat(rows.data, rows.type, token[slot] * rows.stride + k);
}

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

/// Elements k to k + 7 of a slot's row; zeros from element `columns` on.
MARLIN_DEVICE void LoadEightOfRow(const ExpertRows& rows, const int* token, int slot, int columns,
                                  int k, float (&values)[8]) {
  const int64_t first = (rows.gated ? slot : token[slot]) * rows.stride + k;
  LoadEight(rows, first, columns - k, values);
  if (!rows.gated) return;
  float ups[8];
  LoadEight(rows, first + columns, columns - k, ups);
  ReplaceByProducts<false>(rows.gate, values, ups);
}

/// Elements k to k + 7 of a slot's row as operands; zeros from element `columns` on.
template <typename T>
MARLIN_DEVICE uint4 LoadEightOfRow(const ExpertRows& rows, const int* token, int slot, int columns,
                                   int k) {
  const Element own = T::kIsBf16 ? Element::kBf16 : Element::kF16;
  if (!rows.gated && rows.type == own && k + 8 <= columns) {
    const auto* from = static_cast<const uint16_t*>(rows.data) + token[slot] * rows.stride + k;
    if (IsAligned16(from)) return *reinterpret_cast<const uint4*>(from);
  }
  float values[8];
  LoadEightOfRow(rows, token, slot, columns, k, values);
  return {T::Pack(values[0], values[1]), T::Pack(values[2], values[3]),
          T::Pack(values[4], values[5]), T::Pack(values[6], values[7])};
}

}  // namespace marlin::cuda
