// The inputs of plans for the kernels on tiles: the problem and the device.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"
#include "backends/cuda/plan/device_costs.h"
#include "base/checked.h"

// Forward-declared because device code, which includes no public header, includes this one.
namespace marlin {
struct GemmDesc;
}

namespace marlin::cuda {

/// The device properties that plans depend on; the defaults are an H200's.
struct DeviceShape {
  /// As DeviceProperties. Before 90: no TMA, no clusters, no programmatic dependent launch.
  int code = 90;
  bool has_wgmma = true;
  int multiprocessors = 132;
  /// Resident clusters of 1, 2, ... CTAs, at one CTA per SM.
  int clusters[kMaxSplits] = {132, 66, 42, 30, 24, 20, 16, 14};
  int shared_bytes = 227 * 1024;  ///< Limit per CTA.
  DeviceRates rates = {};
  const DeviceCosts* costs = &kH200Costs;

  bool has_tma() const { return code >= 90; }
  bool has_multicast() const { return has_wgmma; }
};

/// A GEMM on weight tiles.
struct TileProblem {
  int m = 0;
  int n = 0;
  int k = 0;
  int tile_bytes = 0;
  bool gated = false;
  bool batch_invariant = false;
  bool pair_table = false;    ///< Decodes with a shared-memory LUT (kTable4).
  bool sparse = false;        ///< The tiles are sparse.
  bool narrow_codes = false;  ///< Up to 4 bits, one scale per tile: units may have two n-tiles.
};

/// The problem of a GEMM on tiles. Precondition: m, n and k fit an int.
TileProblem TileProblemOf(const GemmDesc& desc);

/// Size of an mbarrier.
inline constexpr int kBarrierBytes = 8;

/// CeilDivide for quotients that fit an int.
inline int Ceil(int64_t a, int64_t b) { return static_cast<int>(CeilDivide(a, b)); }

/// Bytes of split-K partial sums in the workspace.
inline int64_t PartialBytes(const TileProblem& problem, int splits) {
  return int64_t{problem.m} * problem.n * splits * int64_t{sizeof(float)};
}

}  // namespace marlin::cuda
