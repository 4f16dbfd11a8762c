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

}  // namespace

std::optional<RouterPlan> PlanRouter(const RouterShape& shape, int shared_bytes) {
  if (shape.hidden < 1 || shape.hidden % 4 != 0) return std::nullopt;
  if (shape.experts < 1 || shape.experts > kMostTeamExperts) return std::nullopt;
  RouterPlan plan;
  plan.k_tiles = Ceil(shape.hidden, kTileK);
  plan.tiles_of_part = Ceil(plan.k_tiles, kRouterParts);
  plan.strips = Ceil(shape.experts, kStripOutputs);
  // Four more: the tokens' sums then begin in different banks.
  plan.sum_stride = plan.strips * kStripOutputs + 4;
  // Bounds the products below.
  if (plan.tiles_of_part > shared_bytes / kFragmentBytes) return std::nullopt;
  RouterLayout layout;
  plan.fragments = layout.Take(plan.tiles_of_part * kFragmentBytes);
  plan.own_sums = layout.Take(kRouterN8 * plan.sum_stride * 4);
  plan.part_sums = layout.Take(kRouterParts * plan.sum_stride * 4);
  plan.logits = layout.Take(shape.experts * 4);
  plan.ids = layout.Take(shape.experts * 4);
  plan.scores = layout.Take(2 * shape.experts * 8);
  plan.exchange = layout.Take(kRouterParts * 8);
  plan.barriers = layout.Take((plan.tiles_of_part + 1) * kBarrierBytes);
  const int slot_bytes = plan.strips * kDenseTileBytes;
  plan.slots = std::min(plan.tiles_of_part, (shared_bytes - layout.used()) / slot_bytes);
  if (layout.used() > shared_bytes || plan.slots < 1) return std::nullopt;
  plan.total_bytes = layout.used() + plan.slots * slot_bytes;
  return plan;
}

}  // namespace marlin::cuda
