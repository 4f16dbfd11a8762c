#include "backends/cuda/gemm/fp8/fp8_plan.h"

#include <algorithm>

#include "backends/cuda/gemm/wgmma/wgmma_plan.h"
#include "backends/cuda/plan/kernel_family.h"
#include "backends/cuda/plan/tile_waves.h"
#include "base/checked.h"

namespace marlin::cuda {
namespace {

/// Output tiles and GLU are as in the WGMMA kernel; the shared memory is not.
WgmmaPlan TilesOf(const TileProblem& problem, const DeviceShape& device, int tokens) {
  return PlanWholeTiles(problem, device, {tokens, 1});
}

std::optional<Tail> TailOf(const DeviceShape& device, int tokens, const WgmmaArguments& args) {
  const auto& costs = device.costs->wgmma.fp8_steps;
  const auto* const cost = std::ranges::find(costs, tokens, &StepCost::tokens);
  return TailOf(costs, *cost, device, args.tiles, args.items);
}

/// Lays out shared memory with as many pipeline stages as fit.
void DivideShared(const TileProblem& problem, const DeviceShape& device, Fp8Launch* launch) {
  constexpr int kBarriersBytes = 2 * 8;  // Per stage.
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

TileProblem Fp8ProblemOf(const GemmDesc& desc) {
  GemmDesc expanded = desc;
  expanded.weights.sparse = false;
  return TileProblemOf(expanded);
}

Fp8Plan PlanFp8(const TileProblem& problem, const DeviceShape& device) {
  int best = 0;
  double least = 0;
  for (const StepCost& cost : device.costs->wgmma.fp8_steps) {
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

namespace {

/// The only kernel of its accuracy class: the estimate is never compared with another.
double Fp8Microseconds(const GemmDesc& desc, const DeviceShape& device) {
  const TileProblem problem = Fp8ProblemOf(desc);
  const Fp8Plan plan = PlanFp8(problem, device);
  const WgmmaArguments& args = plan.arguments.product;
  const auto* const cost =
      std::ranges::find(device.costs->wgmma.fp8_steps, plan.tokens, &StepCost::tokens);
  return CyclesOf(*cost, device.multiprocessors, args.tiles, args.items,
                  TailOf(device, plan.tokens, args)) /
         device.costs->wgmma.cycles_per_microsecond;
}

}  // namespace

const KernelFamily& Fp8Family() {
  static constexpr KernelFamily kFamily = {.microseconds = Fp8Microseconds,
                                           .variants = nullptr,
                                           .can_run_as = nullptr,
                                           .available = NeedsWgmma};
  return kFamily;
}

namespace {

Support SupportsQuantized(const GemmDesc& desc) {
  if (desc.accuracy != Accuracy::kW4A8) return {"quantizes activations: needs accuracy w4a8"};
  if (desc.weights.marlin_w4) return {"does not read the marlin_w4 layout"};
  if (!desc.weights.tiled || !desc.weights.fits_fp8) {
    return {
        "groups are not multiples of 32, scales are fp32, there are biases, or codes minus zeros "
        "do not fit e4m3"};
  }
  if (desc.m > kMostRows) return {"takes up to {0} rows", kMostRows};
  return {};
}

}  // namespace

Support SupportsFp8(const GemmDesc& desc, const DeviceProperties& device) {
  if (const Support support = NeedsWgmma(device); !support.ok()) return support;
  return SupportsQuantized(desc);
}

Support SupportsFp8Mma(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  return SupportsQuantized(desc);
}

}  // namespace marlin::cuda
