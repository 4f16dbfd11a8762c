// How the exact kernels divide a product: what host and device agree on.
#pragma once

#include <cstdint>

#include "backends/cuda/device_views.h"

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

/// Strips of 32 outputs that a thread block of so many rows has. Two strips read the activations
/// in shared memory once; they take the registers of two thread blocks.
MARLIN_HOST_DEVICE constexpr int ExactStripsFor(int rows) { return rows == 16 ? 2 : 1; }
MARLIN_HOST_DEVICE constexpr int ExactMaxWarps(int rows) {
  return rows == 16 ? kMaxExactParts / 2 : kMaxExactParts;
}

/// Rows that a thread block multiplies at a time: 1, 4, 8 or 16, which is for blocks enough to fill
/// the device.
inline int ExactRowsFor(int m, int outputs) {
  constexpr int64_t kEnoughBlocks = 128;
  if (m <= 4) return m <= 1 ? 1 : 4;
  const int64_t blocks = (int64_t{m} + 15) / 16 * ((outputs + 63) / 64);
  return m <= 8 || blocks < kEnoughBlocks ? 8 : 16;
}

/// Warps of a thread block, which take the parts in turn: all at once where there are fewer blocks
/// than fill the device twice; else two blocks to a multiprocessor, one begins while one ends.
inline int ExactWarpsFor(int rows, int64_t blocks, int parts) {
  constexpr int kManyBlocks = 200;
  const int wanted = blocks < kManyBlocks ? ExactMaxWarps(rows) : kMaxExactParts / 2;
  return parts < wanted ? parts : wanted;
}

/// Per warp the activations of a unit; sums of the parts; the gates of gated products.
inline int ExactSharedBytes(int rows, int warps, int parts) {
  const int outputs = ExactStripsFor(rows) * kStripOutputs;
  return (warps * kExactUnit + (parts + 1) * outputs) * rows * static_cast<int>(sizeof(float));
}

template <typename View>
struct ExactArguments {
  View weights;
  ActivationView a;
  EpilogueView epilogue;
  ExactParts split;
};

}  // namespace marlin::cuda
