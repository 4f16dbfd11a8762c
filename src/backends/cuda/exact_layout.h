// How the exact kernels divide a product: what host and device agree on.
#pragma once

#include <cstdint>

#include "backends/cuda/device_views.h"

namespace marlin::cuda {

inline constexpr int kExactUnit = 64;      ///< k that a warp multiplies at a time: half a tile.
inline constexpr int kExactStepK = 4;      ///< k of one lane in one step; four lanes share a step.
inline constexpr int kExactSteps = 4;      ///< Of a unit.
inline constexpr int kMaxExactParts = 16;  ///< Warps of a thread block, each with its part of k.

/// The parts of k, which follow from the weights' shape alone: a row's sum does not depend on m.
struct ExactParts {
  int units = 0;
  int units_of_part = 0;  ///< Of every part but perhaps the last.
  int parts = 1;
};

/// Few columns make few thread blocks, which then need more warps each.
inline ExactParts PlanExactParts(int n, int k) {
  constexpr int kFewColumns = 6144;
  const int wanted = n <= kFewColumns ? kMaxExactParts : kMaxExactParts / 2;
  ExactParts plan;
  plan.units = (k + kExactUnit - 1) / kExactUnit;
  plan.units_of_part = (plan.units + wanted - 1) / wanted;
  if (plan.units > 0) plan.parts = (plan.units + plan.units_of_part - 1) / plan.units_of_part;
  return plan;
}

/// Rows that a thread block multiplies at a time: the kernels are compiled for these numbers.
inline int ExactRowsFor(int m) { return m <= 1 ? 1 : m <= 4 ? 4 : m <= 8 ? 8 : 16; }

/// Per warp the activations of a unit, later its sums; behind them the gates of gated products.
inline int ExactSharedBytes(int rows, int parts) {
  return (parts * kExactUnit + kStripOutputs) * rows * static_cast<int>(sizeof(float));
}

template <typename View>
struct ExactArguments {
  View weights;
  ActivationView a;
  EpilogueView epilogue;
  ExactParts split;
  bool pairs = false;  ///< Two activations at even k can be loaded at once.
};

}  // namespace marlin::cuda
