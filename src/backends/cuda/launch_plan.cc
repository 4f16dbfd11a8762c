#include "backends/cuda/launch_plan.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "base/checked.h"

namespace marlin::cuda {
namespace {

constexpr int kBarrierBytes = 8;

int Ceil(int64_t a, int64_t b) { return static_cast<int>(CeilDivide(a, b)); }
/// Between rows of activations, so that the rows of a matrix begin in different banks.
constexpr int kRowPadding = 16;

/// Divides shared memory for a number of splits; false when it does not fit.
bool FillGemv(const TileProblem& problem, const DeviceShape& device, int warps, int splits,
              GemvPlan* plan) {
  GemvArguments& args = plan->arguments;
  args.m = problem.m;
  args.k = problem.k;
  args.tiles = Ceil(problem.k, kTileK);
  args.tiles_of_split = Ceil(args.tiles, splits);
  plan->splits = Ceil(args.tiles, args.tiles_of_split);
  plan->warps = warps;
  args.piece_log = 0;
  while (args.tiles_of_split > kMaxPieces << args.piece_log) ++args.piece_log;
  args.tiles_of_piece = 1 << args.piece_log;
  args.pieces = Ceil(args.tiles_of_split, args.tiles_of_piece);
  const int64_t row_bytes = int64_t{args.tiles_of_split} * kTileK * 2 + kRowPadding;
  const int64_t ring = int64_t{warps} * args.stages * problem.tile_bytes;
  const int64_t activations = row_bytes * problem.m;
  const int64_t sums = int64_t{warps} * kSumFloats * 4;
  const int64_t total = RoundUp(ring, int64_t{128}) + RoundUp(activations, int64_t{16}) + sums +
                        (kMaxPieces + int64_t{warps} * args.stages) * kBarrierBytes;
  if (total > device.shared_bytes) return false;
  args.row_bytes = static_cast<int>(row_bytes);
  args.activations_offset = static_cast<int>(RoundUp(ring, int64_t{128}));
  args.sums_offset = args.activations_offset + static_cast<int>(RoundUp(activations, int64_t{16}));
  args.barriers_offset = args.sums_offset + static_cast<int>(sums);
  plan->shared_bytes = static_cast<int>(total);
  return true;
}

}  // namespace

GemvPlan PlanGemv(const TileProblem& problem, const DeviceShape& device) {
  GemvPlan plan;
  GemvArguments& args = plan.arguments;
  // Two tiles a warp keep memory busy; tiles of wide codes fill the rings with half the warps. More
  // only delay the activations, which queue behind them.
  args.stages = 2;
  const int warps = problem.tile_bytes <= 3072 ? 16 : 8;
  const int strips = Ceil(problem.n, kStripOutputs);
  const int tiles = Ceil(problem.k, kTileK);
  // Blocks for all multiprocessors, as far as there is k to split.
  int splits = std::clamp(device.multiprocessors / strips, 1, std::max(1, tiles / warps));
  while (!FillGemv(problem, device, warps, splits, &plan)) ++splits;
  plan.groups = std::min(strips, std::max(1, device.multiprocessors / plan.splits));
  args.strips_base = strips / plan.groups;
  args.strips_rest = strips % plan.groups;
  // As many warps to a strip as leave none without one.
  const int strips_of_block = Ceil(strips, plan.groups);
  const auto lanes = static_cast<int>(
      std::bit_floor(static_cast<unsigned>(std::min(strips_of_block, plan.warps))));
  args.share = plan.warps / lanes;
  args.share_log = std::countr_zero(static_cast<unsigned>(args.share));
  args.lanes_log = std::countr_zero(static_cast<unsigned>(lanes));
  plan.partials = plan.splits > 1 || problem.gated;
  return plan;
}

namespace {

/// Cycles of one step of 128 k on one multiprocessor, and around the steps of an item (filling the
/// pipeline, storing), measured on an H200 with FP4; other kinds differ too little to plan
/// otherwise.
struct StepCost {
  int tokens;
  double step;
  double item;
};
constexpr StepCost kStepCosts[] = {
    {32, 760, 1500}, {64, 950, 1700}, {128, 1250, 2000}, {256, 2060, 2800}};
/// What a cluster costs: its start, two barriers and the sums sent, more for every block.
constexpr double kClusterCycles = 700;
constexpr double kClusterCyclesPerBlock = 250;
constexpr double kClusterCyclesPerToken = 12;  ///< And block.

/// Gates and ups begin at whole pairs of strips.
bool HalvesAligned(const TileProblem& problem) { return problem.n % kBlockOutputs == 0; }

/// Blocks of 128 outputs, or of 64 gates and their ups.
int BlocksOf(const TileProblem& problem) {
  return problem.gated && HalvesAligned(problem) ? Ceil(problem.n / 2, kBlockOutputs / 2)
                                                 : Ceil(problem.n, kBlockOutputs);
}

/// Clusters run at once, have at least four tiles a block, and a part of the sums for every block.
bool CanSplit(const TileProblem& problem, const DeviceShape& device, int tokens, int64_t items,
              int splits) {
  constexpr int kLeastTiles = 4;
  return !problem.batch_invariant && tokens <= kMaxClusterTokens && splits <= tokens / 8 &&
         Ceil(problem.k, kTileK) >= splits * kLeastTiles && items <= device.clusters[splits - 1];
}

double CostOf(const TileProblem& problem, const DeviceShape& device, const StepCost& cost,
              int64_t items, int splits) {
  const int tiles = Ceil(Ceil(problem.k, kTileK), splits);
  const auto waves = static_cast<double>(CeilDivide(items * splits, device.multiprocessors));
  const double per_block = kClusterCyclesPerBlock + cost.tokens * kClusterCyclesPerToken;
  const double cluster = splits > 1 ? kClusterCycles + splits * per_block : 0;
  return waves * (tiles * cost.step + cost.item) + cluster;
}

WgmmaShape CheapestShape(const TileProblem& problem, const DeviceShape& device, int blocks) {
  WgmmaShape best = {256, 1};
  double best_cost = 0;
  for (const StepCost& cost : kStepCosts) {
    const int64_t items = int64_t{Ceil(problem.m, cost.tokens)} * blocks;
    for (int splits = 1; splits <= kMaxSplits; ++splits) {
      if (splits > 1 && !CanSplit(problem, device, cost.tokens, items, splits)) continue;
      const double cycles = CostOf(problem, device, cost, items, splits);
      if (best_cost == 0 || cycles < best_cost) {
        best_cost = cycles;
        best = {cost.tokens, splits};
      }
    }
  }
  return best;
}

}  // namespace

WgmmaShape ChooseWgmmaShape(const TileProblem& problem, const DeviceShape& device) {
  return CheapestShape(problem, device, BlocksOf(problem));
}

bool CanPlanWgmmaAs(const TileProblem& problem, const DeviceShape& device,
                    const WgmmaShape& shape) {
  const auto has_tokens = [&](const StepCost& cost) { return cost.tokens == shape.tokens; };
  if (std::none_of(std::begin(kStepCosts), std::end(kStepCosts), has_tokens)) return false;
  if (shape.splits == 1) return true;
  const int64_t items = int64_t{Ceil(problem.m, shape.tokens)} * BlocksOf(problem);
  return shape.splits > 1 && shape.splits <= kMaxSplits &&
         CanSplit(problem, device, shape.tokens, items, shape.splits);
}

WgmmaPlan PlanWgmma(const TileProblem& problem, const DeviceShape& device) {
  return PlanWgmmaAs(problem, device, ChooseWgmmaShape(problem, device));
}

WgmmaPlan PlanWgmmaAs(const TileProblem& problem, const DeviceShape& device,
                      const WgmmaShape& shape) {
  WgmmaPlan plan;
  WgmmaArguments& args = plan.arguments;
  const bool fused_gate = problem.gated && HalvesAligned(problem);
  args.blocks = BlocksOf(problem);
  plan.tokens = shape.tokens;
  args.tiles = Ceil(problem.k, kTileK);
  args.splits = shape.splits;
  plan.partials = problem.gated && !fused_gate;
  if (fused_gate) args.half_strips = problem.n / 2 / kStripOutputs;
  args.m = problem.m;
  args.token_tiles = Ceil(problem.m, plan.tokens);
  args.items = args.token_tiles * args.blocks;
  plan.grid = std::min(args.items * args.splits, device.multiprocessors);

  const int stage = StageActivationBytes(plan.tokens) + kStripsOfBlock * problem.tile_bytes;
  constexpr int kMaxStages = 8;
  const int stage_and_barriers = stage + 2 * kBarrierBytes;
  args.stages = std::min((device.shared_bytes - kExchangeBytes) / stage_and_barriers, kMaxStages);
  args.weights_offset = args.stages * StageActivationBytes(plan.tokens);
  args.exchange_offset = args.stages * stage;
  args.barriers_offset = args.exchange_offset + kExchangeBytes;
  plan.shared_bytes = args.barriers_offset + args.stages * 2 * kBarrierBytes;
  return plan;
}

int64_t PartialBytes(const TileProblem& problem, int splits) {
  return int64_t{problem.m} * problem.n * splits * int64_t{sizeof(float)};
}

}  // namespace marlin::cuda
