// Tiling of the GEMV kernel: pure functions of the problem and the device.
#pragma once

#include <cstdint>
#include <optional>

#include "backends/cuda/gemm/gemv/gemv_layout.h"
#include "backends/cuda/plan/tile_problem.h"
#include "base/checked.h"

namespace marlin::cuda {

inline constexpr int kMaxGemvRows = 16;

struct GemvPlan {
  int splits = 1;
  int groups = 1;  ///< CTAs along n.
  int warps = 16;
  int strips = 1;  ///< n-tiles per unit.
  int shared_bytes = 0;
  bool partials = false;    ///< Sums go to the workspace.
  bool in_memory = false;   ///< Given split-K scratch, the CTAs reduce them, not a kernel.
  GemvArguments arguments;  ///< The fields that depend on the problem's shape alone.
};
/// Units of all CTAs along n.
inline int UnitsOf(const GemvPlan& plan) {
  return plan.arguments.units_base * plan.groups + plan.arguments.units_rest;
}

/// Words of the tile counters of a plan that reduces in global memory, and bytes of them and the
/// sums.
inline int64_t CounterWords(const GemvPlan& plan) { return RoundUp(UnitsOf(plan), int64_t{32}); }
int64_t SplitWorkspaceBytes(const GemvPlan& plan);

/// The tile configuration of the GEMV kernel.
struct GemvShape {
  int warps = 16;
  int stages = 1;        ///< Tiles in flight per warp: up to kMaxStages or kMaxBulkStages.
  int first_stages = 1;  ///< Stages that are requested before the activations.
  int splits = 1;        ///< Split-K: CTAs along k.
  int strips = 1;        ///< n-tiles per unit: 1 or 2.
  /// CTAs in a multicast group for activations: 1, or 2 if k is a multiple of 8 and, in clusters,
  /// splits x 2 are at most kMaxSplits.
  int multicast = 1;
  bool in_memory = false;  ///< Splits are reduced in global memory, not in a cluster.
};
/// std::nullopt where shared memory does not suffice. Preconditions as for PlanGemv.
std::optional<GemvPlan> PlanGemvAs(const TileProblem& problem, const DeviceShape& device,
                                   const GemvShape& shape);
/// Precondition: 1 <= m <= kMaxGemvRows, n, k > 0.
GemvPlan PlanGemv(const TileProblem& problem, const DeviceShape& device);

/// The expected time of a plan, without the parts that all plans of the problem share.
double GemvMicroseconds(const TileProblem& problem, const DeviceShape& device,
                        const GemvPlan& plan);

}  // namespace marlin::cuda
