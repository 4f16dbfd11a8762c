// Reading the rows that the experts' GEMMs multiply: gathered by token, or the gated activation of
// gates and ups.
#pragma once

#include "backends/cuda/kernels/common/epilogue.cuh"
#include "backends/cuda/kernels/common/fragment_math.cuh"
#include "backends/cuda/kernels/experts/experts_layout.h"

namespace marlin::cuda {

/// Element k of a slot's row.
MARLIN_DEVICE float LoadRowElement(const ExpertRows& rows, const SlotsView& slots, int slot,
                                   int columns, int k) {
  if (rows.gated) {
    const float* const row = static_cast<const float*>(rows.data) + slot * rows.stride;
    return GateProduct(rows.gate, row[k], row[columns + k]);
  }
  return LoadFloat(rows.data, rows.type, slots.token[slot] * rows.stride + k);
}

/// Elements k to k + 7 of a slot's row as operands; zeros from element `columns` on.
template <typename T>
MARLIN_DEVICE uint4 LoadEightOfRow(const ExpertRows& rows, const SlotsView& slots, int slot,
                                   int columns, int k) {
  const Element own = T::kIsBf16 ? Element::kBf16 : Element::kF16;
  if (!rows.gated && rows.type == own && k + 8 <= columns) {
    const auto* from =
        static_cast<const uint16_t*>(rows.data) + slots.token[slot] * rows.stride + k;
    if (reinterpret_cast<uintptr_t>(from) % 16 == 0) return *reinterpret_cast<const uint4*>(from);
  }
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] = k + i < columns ? LoadRowElement(rows, slots, slot, columns, k + i) : 0.0f;
  }
  return {T::Pack(values[0], values[1]), T::Pack(values[2], values[3]),
          T::Pack(values[4], values[5]), T::Pack(values[6], values[7])};
}

}  // namespace marlin::cuda
