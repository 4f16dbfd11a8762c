// How the exact kernels divide a product: what host and device agree on.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/device_views.h"

namespace marlin::cuda {

inline constexpr int kExactUnit = 64;      ///< k that a warp multiplies at a time: half a tile.
inline constexpr int kExactStepK = 4;      ///< k of one lane in one step; four lanes share a step.
inline constexpr int kExactSteps = 4;      ///< Of a unit.
inline constexpr int kMaxExactParts = 16;  ///< Of k.

/// The parts of k, which follow from k alone: a row's sum does not depend on m.
struct ExactParts {
  int units = 0;
  int units_of_part = 0;  ///< Of every part but perhaps the last.
  int parts = 1;
};

inline ExactParts PlanExactParts(int k) {
  ExactParts plan;
  plan.units = (k + kExactUnit - 1) / kExactUnit;
  plan.units_of_part = (plan.units + kMaxExactParts - 1) / kMaxExactParts;
  if (plan.units > 0) plan.parts = (plan.units + plan.units_of_part - 1) / plan.units_of_part;
  return plan;
}

/// Rows that a thread block multiplies at a time: the kernels are compiled for these numbers.
inline int ExactRowsFor(int m) { return m <= 1 ? 1 : m <= 4 ? 4 : m <= 8 ? 8 : 16; }

/// Warps of a thread block, which take the parts in turn: all at once where there are fewer blocks
/// than fill the device twice; else two blocks to a multiprocessor, one begins while one ends.
inline int ExactWarpsFor(int64_t blocks, int parts) {
  constexpr int kManyBlocks = 200;
  const int wanted = blocks < kManyBlocks ? kMaxExactParts : kMaxExactParts / 2;
  return parts < wanted ? parts : wanted;
}

/// Per warp the activations of a unit; sums of the parts; the gates of gated products.
inline int ExactSharedBytes(int rows, int warps, int parts) {
  return (warps * kExactUnit + (parts + 1) * kStripOutputs) * rows *
         static_cast<int>(sizeof(float));
}

template <typename View>
struct ExactArguments {
  View weights;
  ActivationView a;
  EpilogueView epilogue;
  ExactParts split;
};

}  // namespace marlin::cuda
