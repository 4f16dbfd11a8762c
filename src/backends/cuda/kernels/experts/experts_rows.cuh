// Reading the rows that the experts' GEMMs multiply: gathered by token, or the gated activation of
// gates and ups.
#pragma once

#include "backends/cuda/kernels/common/epilogue.cuh"
#include "backends/cuda/kernels/experts/experts_layout.h"

namespace marlin::cuda {

MARLIN_DEVICE float GateProduct(const GateView& gate, float g, float u) {
  if (gate.limit == 0.0f) return Activate(gate.activation, g) * u;
  // Comparisons that keep NaN.
  g = g > gate.limit ? gate.limit : g;
  u = u > gate.limit ? gate.limit : u < -gate.limit ? -gate.limit : u;
  return TimesSigmoid((u + 1.0f) * g, gate.alpha * g);
}

/// Element k of a slot's row.
MARLIN_DEVICE float LoadRowElement(const ExpertRows& rows, const SlotsView& slots, int slot,
                                   int columns, int k) {
  if (rows.gated) {
    const float* const row = static_cast<const float*>(rows.data) + slot * rows.stride;
    return GateProduct(rows.gate, row[k], row[columns + k]);
  }
  return LoadFloat(rows.data, rows.type, slots.token[slot] * rows.stride + k);
}

}  // namespace marlin::cuda
