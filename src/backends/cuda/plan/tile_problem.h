// The inputs of plans for the kernels on tiles: the problem and the device.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"
#include "backends/cuda/plan/device_costs.h"
#include "base/checked.h"

// Kernels include this too, which do without the library's own headers.
namespace marlin {
struct GemmDesc;
}

namespace marlin::cuda {

/// Properties of a device that plans depend on; without values those of an H200.
struct DeviceShape {
  int multiprocessors = 132;
  /// How many clusters of 1, 2, ... blocks, one block to a multiprocessor, run at once.
  int clusters[kMaxSplits] = {132, 66, 42, 30, 24, 20, 16, 14};
  int shared_bytes = 227 * 1024;  ///< That a thread block may have.
  const DeviceCosts* costs = &kH200Costs;
};

/// A problem on tiles.
struct TileProblem {
  int m = 0;
  int n = 0;
  int k = 0;
  int tile_bytes = 0;
  bool gated = false;
  bool batch_invariant = false;
  bool pair_table = false;    ///< Codes are looked up in a table in shared memory (kTable4).
  bool narrow_codes = false;  ///< Up to 4 bits, one scale to a tile: units may have two strips.
};

/// The problem of a GEMM on tiles. Precondition: m, n and k fit an int.
TileProblem TileProblemOf(const GemmDesc& desc);

/// Of a barrier in shared memory.
inline constexpr int kBarrierBytes = 8;

/// CeilDivide of what fits an int.
inline int Ceil(int64_t a, int64_t b) { return static_cast<int>(CeilDivide(a, b)); }

/// Bytes of partial sums in the workspace.
inline int64_t PartialBytes(const TileProblem& problem, int splits) {
  return int64_t{problem.m} * problem.n * splits * int64_t{sizeof(float)};
}

}  // namespace marlin::cuda
