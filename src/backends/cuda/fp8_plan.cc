#include "backends/cuda/fp8_plan.h"

#include <algorithm>

#include "base/checked.h"

namespace marlin::cuda {
namespace {

/// Cycles of one step of 128 k on one multiprocessor, and around the steps of an item, measured on
/// an H200 with FP4 and groups of 128.
struct StepCost {
  int tokens;
  double step;
  double item;
};
constexpr StepCost kStepCosts[] = {{64, 900, 1700}, {128, 1150, 2000}, {256, 1800, 2800}};

}  // namespace

int QuantizedColumns(int k) { return static_cast<int>(RoundUp(int64_t{k}, int64_t{kTileK})); }

Fp8Plan PlanFp8(const TileProblem& problem, const DeviceShape& device) {
  Fp8Plan best;
  double best_cycles = 0;
  for (const StepCost& cost : kStepCosts) {
    const Fp8Plan plan = PlanFp8As(problem, device, cost.tokens);
    const WgmmaArguments& args = plan.arguments.product;
    const auto waves = static_cast<double>(CeilDivide(args.items, device.multiprocessors));
    const double cycles = waves * (args.tiles * cost.step + cost.item);
    if (best_cycles == 0 || cycles < best_cycles) {
      best_cycles = cycles;
      best = plan;
    }
  }
  return best;
}

Fp8Plan PlanFp8As(const TileProblem& problem, const DeviceShape& device, int tokens) {
  constexpr int kBarriersBytes = 2 * 8;  // Of a slot.
  constexpr int kMaxSlots = 8;
  // Tiles, items and gates are those of the warpgroup kernel; shared memory is not.
  const WgmmaPlan like = PlanWholeTiles(problem, device, {tokens, 1});
  Fp8Plan plan;
  plan.tokens = tokens;
  plan.groups = like.groups;
  plan.partials = like.partials;
  plan.arguments.product = like.arguments;
  WgmmaArguments& args = plan.arguments.product;
  const int step = Fp8SlotBytes(tokens) + kStripsOfBlock * problem.tile_bytes;
  args.slots =
      std::min((device.shared_bytes - kExchangeBytes) / (step + kBarriersBytes), kMaxSlots);
  args.weight_slots = args.slots;
  args.weights_offset = args.slots * Fp8SlotBytes(tokens);
  args.exchange_offset = args.slots * step;
  args.barriers_offset = args.exchange_offset + kExchangeBytes;
  plan.shared_bytes = args.barriers_offset + args.slots * kBarriersBytes;
  return plan;
}

}  // namespace marlin::cuda
