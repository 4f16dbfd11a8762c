// Tiling of the WGMMA kernel: pure functions of the problem and the device.
#pragma once

#include <cstdint>
#include <optional>

#include "backends/cuda/gemm/wgmma/wgmma_layout.h"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

/// One launch of the WGMMA kernel.
struct WgmmaLaunch {
  int tokens = 64;  ///< tile_m: one of kWgmmaWidths.
  int shared_bytes = 0;
  int groups = 1;  ///< Groups of `splits` CTAs each.
  WgmmaArguments arguments;
};
struct WgmmaPlan : WgmmaLaunch {
  bool partials = false;  ///< Sums of every output go to the workspace.
  /// Another launch for the tail wave, with a smaller tile_m, where whole tiles would leave most of
  /// the device idle.
  std::optional<WgmmaLaunch> tail;
};
/// Partial sums per output in the workspace, where the plan has partials.
inline int PartsOf(const WgmmaPlan& plan) {
  return plan.arguments.in_cluster ? 1 : plan.arguments.splits;
}
/// Lays out the shared memory of a launch whose `tokens` are set, with as many pipeline stages as
/// are useful and fit.
void DivideShared(const TileProblem& problem, const DeviceShape& device, WgmmaLaunch* launch);
/// Bytes of the tile counters of a stream-K plan, which lie before its parts.
int64_t StreamCounterBytes(const WgmmaPlan& plan);
/// Bytes of the workspace that a plan takes.
int64_t SumBytes(const TileProblem& problem, const WgmmaPlan& plan);
/// The tile configuration: tile_m and the CTAs that split k.
struct WgmmaShape {
  int tokens;
  int splits;
};
/// Precondition: m, n, k > 0.
WgmmaPlan PlanWgmma(const TileProblem& problem, const DeviceShape& device);
/// The plan with a given tile configuration. Precondition: CanPlanWgmmaAs.
WgmmaPlan PlanWgmmaAs(const TileProblem& problem, const DeviceShape& device,
                      const WgmmaShape& shape);
/// The same without a tail launch or stream-K.
WgmmaPlan PlanWholeTiles(const TileProblem& problem, const DeviceShape& device,
                         const WgmmaShape& shape);
/// The tile configuration of PlanWgmma.
WgmmaShape ChooseWgmmaShape(const TileProblem& problem, const DeviceShape& device);
bool CanPlanWgmmaAs(const TileProblem& problem, const DeviceShape& device, const WgmmaShape& shape);

}  // namespace marlin::cuda
