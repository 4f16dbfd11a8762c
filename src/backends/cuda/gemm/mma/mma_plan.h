// Tiling of the MMA kernel: pure functions of the problem and the device.
#pragma once

#include <cstdint>

#include "backends/cuda/gemm/mma/mma_layout.h"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

/// How CTAs of one width fill a multiprocessor.
struct MmaFit {
  int warps = 4;
  int stages = 0;    ///< Pipeline stages; 0: they do not fit.
  int resident = 0;  ///< CTAs that run at once.
};
/// CTAs of `tokens` tokens and `warps` n-tiles, with as many stages as are useful and fit.
MmaFit FitMma(const DeviceShape& device, int tile_bytes, int tokens, int warps, int resident);
/// The same with as many of them as leave enough stages.
MmaFit FitMma(const DeviceShape& device, int tile_bytes, int tokens, int warps);

/// Cycles of a multiprocessor for one k-iteration of one of the CTAs that run on it.
double MmaStepCycles(const TileProblem& problem, const DeviceShape& device, const MmaFit& fit,
                     int tokens);
/// The clock that converts estimates.
double MmaCyclesPerMicrosecond(const DeviceShape& device);

/// The tile configuration: tile_m and the CTAs that split k.
struct MmaShape {
  int tokens;
  int splits;

  bool operator==(const MmaShape&) const = default;
};

struct MmaPlan {
  int tokens = 64;
  int warps = 4;
  int resident = 1;
  int shared_bytes = 0;
  int items = 1;          ///< Output tiles.
  bool partials = false;  ///< Sums of every output go to the workspace.
  double cycles = 0;      ///< The estimate.
  MmaArguments arguments;
};

/// Precondition: m, n, k > 0.
MmaPlan PlanMma(const TileProblem& problem, const DeviceShape& device);
/// The plan with a given tile configuration. Precondition: CanPlanMmaAs.
MmaPlan PlanMmaAs(const TileProblem& problem, const DeviceShape& device, const MmaShape& shape);
bool CanPlanMmaAs(const TileProblem& problem, const DeviceShape& device, const MmaShape& shape);

/// Bytes of the tile counters of a plan with split-K, which lie before its parts.
int64_t MmaCounterBytes(const MmaPlan& plan);
/// Bytes of the workspace that a plan takes.
int64_t MmaWorkspaceBytes(const TileProblem& problem, const MmaPlan& plan);

}  // namespace marlin::cuda
