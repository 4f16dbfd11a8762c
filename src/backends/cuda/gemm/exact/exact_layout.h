// Tiling and parameters of the exact kernels, shared by host and device.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/device_views.h"

namespace marlin::cuda {

inline constexpr int kExactUnit = 64;      ///< k of a warp's k-iteration: half a weight tile.
inline constexpr int kExactStepK = 4;      ///< k of one lane in one step; four lanes share a step.
inline constexpr int kExactSteps = 4;      ///< Steps per unit.
inline constexpr int kMaxExactParts = 16;  ///< Parts that k is split into, at most.

/// The split of k into parts. It follows from k alone, so that a row's sum does not depend on m.
struct ExactParts {
  int units = 0;
  int units_of_part = 0;  ///< The last part may have fewer.
  int parts = 1;
};

MARLIN_HOST_DEVICE ExactParts PlanExactParts(int k) {
  ExactParts plan;
  plan.units = (k + kExactUnit - 1) / kExactUnit;
  plan.units_of_part = (plan.units + kMaxExactParts - 1) / kMaxExactParts;
  if (plan.units > 0) plan.parts = (plan.units + plan.units_of_part - 1) / plan.units_of_part;
  return plan;
}

/// Rows per CTA: the kernels are compiled for these numbers.
inline int ExactRowsFor(int m) { return m <= 1 ? 1 : m <= 4 ? 4 : m <= 8 ? 8 : 16; }

/// Warps per CTA, which take the parts in turn: one warp per part where there are too few CTAs to
/// fill the device twice; otherwise two CTAs per multiprocessor, so that one begins while another
/// ends.
inline int ExactWarpsFor(int64_t blocks, int parts) {
  constexpr int kManyBlocks = 200;
  const int wanted = blocks < kManyBlocks ? kMaxExactParts : kMaxExactParts / 2;
  return parts < wanted ? parts : wanted;
}

/// Each warp's activations of a unit, the sums of the parts, and the gates of GLU.
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

/// The exact kernels (plan/instances.def); their parameter is an ExactArguments<TileView>, or
/// <CanonicalView> where not `tiled`. kDense16 stands for fp32 weights where not tiled.
struct ExactKernels {
  struct Variant {
    bool tiled;
    int rows;  ///< From ExactRowsFor.
  };
  template <typename Tiles>
  static const void* Function(const Variant& variant);
};

}  // namespace marlin::cuda
