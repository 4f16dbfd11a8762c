#include "backends/cuda/fp8_plan.h"

#include <algorithm>

#include "backends/cuda/tile_waves.h"
#include "backends/cuda/wgmma_plan.h"
#include "base/checked.h"

namespace marlin::cuda {
namespace {

/// Measured on an H200 with FP4 and groups of 128.
constexpr StepCost kStepCosts[] = {{64, 870, 1700}, {128, 1105, 2000}, {256, 1690, 2800}};

/// Tiles, items and gates are those of the warpgroup kernel; shared memory is not.
WgmmaPlan TilesOf(const TileProblem& problem, const DeviceShape& device, int tokens) {
  return PlanWholeTiles(problem, device, {tokens, 1});
}

std::optional<Tail> TailOf(const DeviceShape& device, int tokens, const WgmmaArguments& args) {
  const auto* const cost = std::ranges::find(kStepCosts, tokens, &StepCost::tokens);
  return TailOf(kStepCosts, *cost, device.multiprocessors, args.tiles, args.items);
}

/// Divides shared memory with as many slots as there is room for.
void DivideShared(const TileProblem& problem, const DeviceShape& device, Fp8Launch* launch) {
  constexpr int kBarriersBytes = 2 * 8;  // Of a slot.
  constexpr int kMaxSlots = 8;
  WgmmaArguments& args = launch->arguments.product;
  const int activations = Fp8SlotBytes(launch->tokens);
  const int step = activations + kStripsOfBlock * problem.tile_bytes;
  args.slots =
      std::min((device.shared_bytes - kExchangeBytes) / (step + kBarriersBytes), kMaxSlots);
  args.weight_slots = args.slots;
  args.weights_offset = args.slots * activations;
  args.exchange_offset = args.slots * step;
  args.barriers_offset = args.exchange_offset + kExchangeBytes;
  launch->shared_bytes = args.barriers_offset + args.slots * kBarriersBytes;
}

}  // namespace

int QuantizedColumns(int k) { return static_cast<int>(RoundUp(int64_t{k}, int64_t{kTileK})); }

Fp8Plan PlanFp8(const TileProblem& problem, const DeviceShape& device) {
  int best = 0;
  double least = 0;
  for (const StepCost& cost : kStepCosts) {
    const WgmmaArguments args = TilesOf(problem, device, cost.tokens).arguments;
    const double cycles = CyclesOf(cost, device.multiprocessors, args.tiles, args.items,
                                   TailOf(device, cost.tokens, args));
    if (best != 0 && cycles >= least) continue;
    least = cycles;
    best = cost.tokens;
  }
  return PlanFp8As(problem, device, best);
}

Fp8Plan PlanFp8As(const TileProblem& problem, const DeviceShape& device, int tokens) {
  const WgmmaPlan tiles = TilesOf(problem, device, tokens);
  Fp8Plan plan;
  plan.tokens = tokens;
  plan.groups = tiles.groups;
  plan.partials = tiles.partials;
  plan.arguments.product = tiles.arguments;
  DivideShared(problem, device, &plan);
  if (const auto cut = TailOf(device, tokens, tiles.arguments)) {
    Fp8Launch& tail = plan.tail.emplace();
    tail.tokens = cut->tokens;
    tail.arguments.product = CutItems(*cut, tokens, &plan.arguments.product);
    tail.groups = tail.arguments.product.items;
    DivideShared(problem, device, &tail);
  }
  return plan;
}

}  // namespace marlin::cuda
