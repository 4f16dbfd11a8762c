#include "backends/cuda/moe/router/router_plan.h"

#include <algorithm>

#include "backends/cuda/plan/tile_problem.h"
#include "base/checked.h"

namespace marlin::cuda {
namespace {

constexpr int kTableAlignment = 128;

/// Gives out shared memory from its beginning.
class RouterLayout {
 public:
  int Take(int bytes) {
    const int at = used_;
    used_ += static_cast<int>(RoundUp(bytes, kTableAlignment));
    return at;
  }
  int used() const { return used_; }

 private:
  int used_ = 0;
};

/// Divides the shared memory of a cluster's CTA; leaves no slots where it has no room for one.
void PlanCluster(const RouterShape& shape, int shared_bytes, RouterPlan* plan) {
  // Bounds the products below.
  if (plan->tiles_of_part > shared_bytes / kFragmentBytes) return;
  RouterLayout layout;
  plan->fragments = layout.Take(plan->tiles_of_part * kFragmentBytes);
  plan->own_sums = layout.Take(kRouterN8 * plan->sum_stride * 4);
  plan->part_sums = layout.Take(kRouterParts * plan->sum_stride * 4);
  plan->logits = layout.Take(shape.experts * 4);
  plan->ids = layout.Take(shape.experts * 4);
  plan->scores = layout.Take(2 * shape.experts * 8);
  plan->exchange = layout.Take(kRouterParts * 8);
  plan->barriers = layout.Take((plan->tiles_of_part + 1) * kBarrierBytes);
  if (layout.used() > shared_bytes) return;
  const int slot_bytes = plan->strips * kDenseTileBytes;
  plan->slots = std::min(plan->tiles_of_part, (shared_bytes - layout.used()) / slot_bytes);
  plan->total_bytes = layout.used() + plan->slots * slot_bytes;
}

}  // namespace

std::optional<RouterPlan> PlanRouter(const RouterShape& shape, const DeviceShape& device) {
  if (shape.hidden < 1 || shape.hidden % 4 != 0) return std::nullopt;
  if (shape.experts < 1 || shape.experts > kMostTeamExperts) return std::nullopt;
  RouterPlan plan;
  plan.k_tiles = Ceil(shape.hidden, kTileK);
  plan.tiles_of_part = Ceil(plan.k_tiles, kRouterParts);
  plan.strips = Ceil(shape.experts, kStripOutputs);
  // Four more: the tokens' sums then begin in different banks.
  plan.sum_stride = plan.strips * kStripOutputs + 4;
  if (device.has_tma()) PlanCluster(shape, device.shared_bytes, &plan);
  return plan;
}

RouterGemmPlan PlanRouterGemm(int tokens, const RouterPlan& plan, const DeviceShape& device) {
  const auto fits = [&](const RouterGemmPlan& gemm) {
    return RouterGemmBytes(gemm) <= device.shared_bytes;
  };
  RouterGemmPlan gemm;
  gemm.stages = RouterGemmPlan::kMostStages;
  const int64_t narrow = CeilDivide(int64_t{tokens}, int64_t{gemm.n8_tiles} * kRouterN8) *
                         Ceil(plan.strips, kStripsOfBlock);
  if (narrow > device.multiprocessors) {
    gemm.n8_tiles = RouterGemmPlan::kMostN8Tiles;
    if (fits(gemm)) return gemm;
    gemm.n8_tiles = RouterGemmPlan::kFewN8Tiles;
  }
  if (!fits(gemm)) gemm.stages = RouterGemmPlan::kFewStages;
  return gemm;
}

int64_t MostRouterExperts(const DeviceShape& device) {
  constexpr int64_t kMost = 14000;
  return std::min(kMost, int64_t{device.shared_bytes} / kScoreBytes);
}

}  // namespace marlin::cuda
