// How products of more rows are cut into thread blocks: pure functions of the problem and the
// device.
#pragma once

#include <cstdint>
#include <optional>

#include "backends/cuda/kernels/wgmma/wgmma_layout.h"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

/// One launch of the warpgroup kernel.
struct WgmmaLaunch {
  int tokens = 64;  ///< Of a tile: one of kWgmmaWidths.
  int shared_bytes = 0;
  int groups = 1;  ///< Of `splits` blocks each.
  WgmmaArguments arguments;
};
struct WgmmaPlan : WgmmaLaunch {
  bool partials = false;  ///< Sums of every output go to the workspace.
  /// Another launch for the last items, in narrower tiles, where whole ones would leave most of
  /// the device idle.
  std::optional<WgmmaLaunch> tail;
};
/// Sums of every output that go to the workspace, where the plan has partials.
inline int PartsOf(const WgmmaPlan& plan) {
  return plan.arguments.in_cluster ? 1 : plan.arguments.splits;
}
/// Bytes of the tile_counters of a plan with streamed items, which lie before its parts.
int64_t StreamCounterBytes(const WgmmaPlan& plan);
/// Bytes of the workspace that a plan takes.
int64_t SumBytes(const TileProblem& problem, const WgmmaPlan& plan);
/// How many tokens an item has and how many blocks divide its k.
struct WgmmaShape {
  int tokens;
  int splits;
};
/// Precondition: m, n, k > 0.
WgmmaPlan PlanWgmma(const TileProblem& problem, const DeviceShape& device);
/// The plan of a shape that was chosen elsewhere, which CanPlanWgmmaAs allows.
WgmmaPlan PlanWgmmaAs(const TileProblem& problem, const DeviceShape& device,
                      const WgmmaShape& shape);
/// The same without a tail.
WgmmaPlan PlanWholeTiles(const TileProblem& problem, const DeviceShape& device,
                         const WgmmaShape& shape);
/// What PlanWgmma takes.
WgmmaShape ChooseWgmmaShape(const TileProblem& problem, const DeviceShape& device);
bool CanPlanWgmmaAs(const TileProblem& problem, const DeviceShape& device, const WgmmaShape& shape);

}  // namespace marlin::cuda
