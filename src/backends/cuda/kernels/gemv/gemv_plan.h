// How products of few rows are cut into thread blocks: pure functions of the problem and the
// device.
#pragma once

#include <cstdint>
#include <optional>

#include "backends/cuda/kernels/gemv/gemv_layout.h"
#include "backends/cuda/plan/tile_problem.h"
#include "base/checked.h"

namespace marlin::cuda {

inline constexpr int kMaxGemvRows = 16;

/// Tiles in flight of a warp of the kernel for few rows, whose rings have no more slots: three and
/// four gained nothing on an H200.
inline constexpr int kMaxStages = 2;

struct GemvPlan {
  int splits = 1;
  int groups = 1;  ///< Blocks along n.
  int warps = 16;
  int strips = 1;  ///< Of a unit: what a warp works on at a time.
  int shared_bytes = 0;
  bool partials = false;    ///< Sums go to the workspace.
  bool in_memory = false;   ///< The blocks add them, given memory to meet in; else a kernel.
  GemvArguments arguments;  ///< The parts that depend on the problem's shape alone.
};
/// Of all blocks along n.
inline int UnitsOf(const GemvPlan& plan) {
  return plan.arguments.units_base * plan.groups + plan.arguments.units_rest;
}

/// Words of the tile_counters of a plan whose blocks meet in memory, and bytes of them and the
/// sums.
inline int64_t CounterWords(const GemvPlan& plan) { return RoundUp(UnitsOf(plan), int64_t{32}); }
int64_t SplitWorkspaceBytes(const GemvPlan& plan);

/// How the blocks of the kernel for few rows are made.
struct GemvShape {
  int warps = 16;
  int stages = 1;        ///< Tiles in flight of every warp: up to kMaxStages.
  int first_stages = 1;  ///< Of them those that are asked for before the activations.
  int splits = 1;        ///< Blocks that divide k.
  int strips = 1;        ///< Of a unit: 1 or 2.
  /// Blocks that share copies of activations: 1, or 2 if k is a multiple of 8 and, in clusters,
  /// splits x 2 are at most kMaxSplits.
  int multicast = 1;
  bool in_memory = false;  ///< Splits meet in memory, not in a cluster.
};
/// Nothing where shared memory does not suffice. Preconditions as for PlanGemv.
std::optional<GemvPlan> PlanGemvAs(const TileProblem& problem, const DeviceShape& device,
                                   const GemvShape& shape);
/// Precondition: 1 <= m <= kMaxGemvRows, n, k > 0.
GemvPlan PlanGemv(const TileProblem& problem, const DeviceShape& device);

/// The expected time of a plan, without the parts that all plans of the problem share.
double GemvMicroseconds(const TileProblem& problem, const DeviceShape& device,
                        const GemvPlan& plan);

}  // namespace marlin::cuda
