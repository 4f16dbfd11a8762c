#include "backends/cuda/launch_plan.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

#include "base/checked.h"

namespace marlin::cuda {
namespace {

constexpr int kBarrierBytes = 8;

int Ceil(int64_t a, int64_t b) { return static_cast<int>(CeilDivide(a, b)); }
/// Between rows of activations, so that the rows of a matrix begin in different banks.
constexpr int kRowPadding = 16;

/// Divides shared memory; false when it does not suffice.
bool DivideShared(const TileProblem& problem, const DeviceShape& device, GemvPlan* plan) {
  GemvArguments& args = plan->arguments;
  args.piece_log = 0;
  while (args.tiles_of_split > kMaxPieces << args.piece_log) ++args.piece_log;
  args.pieces = Ceil(args.tiles_of_split, 1 << args.piece_log);
  const int64_t row_bytes = int64_t{args.tiles_of_split} * kTileK * 2 + kRowPadding;
  const int64_t slot_bytes = int64_t{plan->strips} * problem.tile_bytes;
  const int64_t ring = RoundUp(plan->warps * args.stages * slot_bytes, int64_t{128});
  const int64_t activations = RoundUp(row_bytes * problem.m, int64_t{16});
  const int64_t sums = int64_t{plan->warps} * kSumFloats * 4;
  const int64_t strips = int64_t{args.units_base + (args.units_rest > 0 ? 1 : 0)} * plan->strips;
  const int64_t slots = args.in_cluster ? RoundUp(strips, int64_t{args.splits}) : 0;
  const int64_t inbox = slots * problem.m * kStripOutputs * 4;
  const int64_t barriers = (kMaxPieces + int64_t{plan->warps} * args.stages) * kBarrierBytes;
  const int64_t table = problem.pair_table ? kPairTableBytes : 0;
  const int64_t total = ring + activations + sums + inbox + table + barriers;
  if (total > device.shared_bytes) return false;
  args.row_bytes = static_cast<int>(row_bytes);
  args.activations_offset = static_cast<int>(ring);
  args.sums_offset = args.activations_offset + static_cast<int>(activations);
  args.inbox_offset = args.sums_offset + static_cast<int>(sums);
  args.table_offset = args.inbox_offset + static_cast<int>(inbox);
  args.barriers_offset = args.table_offset + static_cast<int>(table);
  // Over half of what there is: blocks of the next launch, which may begin early, would spread
  // unevenly over the multiprocessors if two fitted on one.
  plan->shared_bytes = std::max(static_cast<int>(total), device.shared_bytes / 2 + 1);
  return true;
}

/// Which warps work on which units: as many units at a time as leave the fewest tiles to the
/// busiest warp, for with every unit its warps wait for each other.
void ShareUnits(int units_of_block, GemvPlan* plan) {
  GemvArguments& args = plan->arguments;
  int64_t least = 0;
  for (int lanes = 1; lanes <= std::min(plan->warps, units_of_block); lanes *= 2) {
    const int64_t tiles =
        int64_t{Ceil(units_of_block, lanes)} * Ceil(args.tiles_of_split, plan->warps / lanes);
    if (least != 0 && tiles > least) continue;
    least = tiles;
    args.share = plan->warps / lanes;
    args.lanes_log = std::countr_zero(static_cast<unsigned>(lanes));
  }
  args.share_log = std::countr_zero(static_cast<unsigned>(args.share));
}

}  // namespace

std::optional<GemvPlan> PlanGemvAs(const TileProblem& problem, const DeviceShape& device,
                                   const GemvShape& shape) {
  GemvPlan plan;
  GemvArguments& args = plan.arguments;
  args.m = problem.m;
  args.k = problem.k;
  args.stages = shape.stages;
  args.tiles = Ceil(problem.k, kTileK);
  args.tiles_of_split = Ceil(args.tiles, shape.splits);
  args.splits = Ceil(args.tiles, args.tiles_of_split);
  args.mates = shape.mates;
  args.bulk = problem.k % 8 == 0;
  args.in_cluster = args.splits > 1 && args.splits <= kMaxSplits && !problem.gated;
  plan.warps = shape.warps;
  plan.strips = shape.strips;
  plan.splits = args.splits;
  plan.partials = problem.gated || (args.splits > 1 && !args.in_cluster);

  const int units = Ceil(problem.n, kStripOutputs * plan.strips);
  const int cluster = (args.in_cluster ? args.splits : 1) * args.mates;
  const int blocks = cluster > 1 ? device.clusters[cluster - 1] * args.mates
                                 : std::max(1, device.multiprocessors / args.splits);
  // Whole clusters; a block without units shares copies.
  plan.groups = static_cast<int>(RoundUp(std::clamp(blocks, 1, units), int64_t{args.mates}));
  args.units_base = units / plan.groups;
  args.units_rest = units % plan.groups;
  ShareUnits(Ceil(units, plan.groups), &plan);
  if (!DivideShared(problem, device, &plan)) return std::nullopt;
  return plan;
}

GemvPlan PlanGemv(const TileProblem& problem, const DeviceShape& device) {
  const int strips = Ceil(problem.n, kStripOutputs);
  const int tiles = Ceil(problem.k, kTileK);
  const int strips_of_block = Ceil(strips, device.multiprocessors);
  // All of this is measured on an H200. Warps wait for each other less often with wide units, but
  // those are for matrices that have enough of them.
  const int wide = problem.narrow_codes && problem.m <= kOctet && strips_of_block > 4 ? 2 : 1;
  // Two tiles a warp keep memory busy; where a block has few, more only delay the activations.
  const int stages = strips_of_block <= 2 || problem.tile_bytes > 3072 ? 1 : 2;
  constexpr int64_t kLeastShared = 56 * 1024;
  const bool share =
      problem.k % 8 == 0 && strips > 1 && int64_t{problem.m} * problem.k * 2 >= kLeastShared;
  constexpr int kWarps = 16;
  // As many as it takes to occupy the multiprocessors and to hold the activations.
  const int held = Ceil(int64_t{problem.m} * problem.k * 2, device.shared_bytes);
  const int busy = std::clamp(device.multiprocessors / strips, 1, std::max(1, tiles / kWarps));
  for (int splits = std::max(held, busy);; ++splits) {
    const int mates = share && splits == 1 ? 2 : 1;
    for (const auto& [warps, deep] : {std::pair{kWarps, stages}, {kWarps, 1}, {8, 2}, {8, 1}}) {
      const auto plan = PlanGemvAs(problem, device, {warps, deep, splits, wide, mates});
      if (plan) return *plan;
    }
  }
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
  // Their activations stay in the cache while they meet all weights.
  constexpr int kNeighbourTokens = 1024;
  args.neighbours = kNeighbourTokens / plan.tokens;
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
