#include "backends/cuda/wgmma_plan.h"

#include <algorithm>
#include <iterator>

#include "backends/cuda/gemv_plan.h"
#include "backends/cuda/tile_waves.h"

namespace marlin::cuda {
namespace {

/// From times measured on an H200 with FP4; other kinds differ too little to plan otherwise. With
/// 256 tokens an instruction count would give less: the card's power limit slows it down.
constexpr StepCost kStepCosts[] = {{16, 625, 1350},  {32, 660, 1500},   {64, 830, 1700},
                                   {96, 965, 1850},  {128, 1200, 2000}, {192, 1730, 2400},
                                   {256, 2250, 2800}};
static_assert(std::size(kStepCosts) == std::size(kWgmmaWidths));
/// What a cluster costs: its start and the sums sent, more for every block.
constexpr double kClusterCycles = 2000;
constexpr double kClusterCyclesPerBlock = 500;
constexpr double kClusterCyclesPerToken = 4;  ///< And block.
/// Where almost as many clusters of three and more run as the device has room for, they wait for
/// each other's multiprocessors.
constexpr double kCrowdedClusters = 0.9;
constexpr double kCrowded = 1.15;

/// What splits that meet in memory cost: another kernel, and the sums stored and read.
constexpr double kMemoryCycles = 5000;
constexpr double kMemoryCyclesPerToken = 60;
constexpr double kMemoryCyclesPerSum = 0.0005;  ///< Of all outputs and splits.

/// Gates and ups begin at whole pairs of strips.
bool HalvesAligned(const TileProblem& problem) { return problem.n % kBlockOutputs == 0; }

/// Blocks of 128 outputs, or of 64 gates and their ups.
int BlocksOf(const TileProblem& problem) {
  return problem.gated && HalvesAligned(problem) ? Ceil(problem.n / 2, kBlockOutputs / 2)
                                                 : Ceil(problem.n, kBlockOutputs);
}

/// Where the sums of an item's splits meet: clusters must run at once and have a part of the sums
/// for every block.
bool InCluster(const DeviceShape& device, int tokens, int64_t items, int splits) {
  return tokens <= kMaxClusterTokens && splits <= tokens / 8 &&
         items <= device.clusters[splits - 1];
}

/// At least four tiles a block, and one wave of blocks.
bool CanSplit(const TileProblem& problem, const DeviceShape& device, int tokens, int64_t items,
              int splits) {
  constexpr int kLeastTiles = 4;
  return !problem.batch_invariant && Ceil(problem.k, kTileK) >= splits * kLeastTiles &&
         (InCluster(device, tokens, items, splits) || items * splits <= device.multiprocessors);
}

/// Null where there are no tiles of so many tokens.
const StepCost* CostOfWidth(int tokens) {
  const auto is_width = [&](const StepCost& cost) { return cost.tokens == tokens; };
  const auto* const found = std::find_if(std::begin(kStepCosts), std::end(kStepCosts), is_width);
  return found == std::end(kStepCosts) ? nullptr : found;
}

/// None with splits, which fill the device.
std::optional<Tail> TailOf(const DeviceShape& device, const StepCost& cost, int tiles,
                           int64_t items, int splits) {
  if (splits > 1) return std::nullopt;
  return TailOf(kStepCosts, cost, device.multiprocessors, tiles, items);
}

/// Gates and ups whose sums go to the workspace apart.
bool GatesApart(const TileProblem& problem) { return problem.gated && !HalvesAligned(problem); }

/// Streams what whole waves leave, where that is faster than a wave of its own or a tail.
std::optional<Stream> StreamOf(const TileProblem& problem, const DeviceShape& device,
                               const StepCost& cost, int64_t items, int splits) {
  if (splits > 1 || problem.batch_invariant || GatesApart(problem)) return std::nullopt;
  const int tiles = Ceil(problem.k, kTileK);
  const double otherwise = CyclesOf(cost, device.multiprocessors, tiles, items,
                                    TailOf(device, cost, tiles, items, splits));
  const auto streamed = StreamOf(cost, device.multiprocessors, tiles, items);
  return streamed && streamed->cycles < otherwise ? streamed : std::nullopt;
}

double CostOf(const TileProblem& problem, const DeviceShape& device, const StepCost& cost,
              int64_t items, int splits) {
  const int tiles = Ceil(Ceil(problem.k, kTileK), splits);
  if (const auto stream = StreamOf(problem, device, cost, items, splits)) return stream->cycles;
  const auto tail = TailOf(device, cost, tiles, items, splits);
  const double cycles = CyclesOf(cost, device.multiprocessors, tiles, items * splits, tail);
  if (splits == 1) return cycles;
  if (!InCluster(device, cost.tokens, items, splits)) {
    const double sums = double{1} * problem.m * problem.n * splits;
    return cycles + kMemoryCycles + cost.tokens * kMemoryCyclesPerToken +
           sums * kMemoryCyclesPerSum;
  }
  const double per_block = kClusterCyclesPerBlock + cost.tokens * kClusterCyclesPerToken;
  const double sum = cycles + kClusterCycles + splits * per_block;
  const bool crowded =
      splits > 2 && static_cast<double>(items) > kCrowdedClusters * device.clusters[splits - 1];
  return crowded ? sum * kCrowded : sum;
}

}  // namespace

WgmmaShape ChooseWgmmaShape(const TileProblem& problem, const DeviceShape& device) {
  const int blocks = BlocksOf(problem);
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

bool CanPlanWgmmaAs(const TileProblem& problem, const DeviceShape& device,
                    const WgmmaShape& shape) {
  if (CostOfWidth(shape.tokens) == nullptr) return false;
  if (shape.splits == 1) return true;
  const int64_t items = int64_t{Ceil(problem.m, shape.tokens)} * BlocksOf(problem);
  return shape.splits > 1 && shape.splits <= kMaxSplits &&
         CanSplit(problem, device, shape.tokens, items, shape.splits);
}

WgmmaPlan PlanWgmma(const TileProblem& problem, const DeviceShape& device) {
  return PlanWgmmaAs(problem, device, ChooseWgmmaShape(problem, device));
}

namespace {

/// Divides shared memory with `slots` of activations.
void DivideSharedFor(const TileProblem& problem, int slots, WgmmaLaunch* launch) {
  WgmmaArguments& args = launch->arguments;
  const int slots_of_step = SlotsOfStep(problem.tile_bytes / TileCodeBytes(1), launch->tokens);
  const int inbox = args.in_cluster ? InboxBytes(launch->tokens, args.splits) : 0;
  args.slots = slots;
  args.weight_slots = Ceil(slots, slots_of_step);
  args.weights_offset = slots * (StepActivationBytes(launch->tokens) / slots_of_step);
  args.exchange_offset =
      args.weights_offset + args.weight_slots * kStripsOfBlock * problem.tile_bytes;
  args.inbox_offset = args.exchange_offset + kExchangeBytes;
  args.barriers_offset = args.inbox_offset + inbox;
  launch->shared_bytes = args.barriers_offset + (slots * 2 + 1) * kBarrierBytes;
}

/// The same with as many as are of use.
void DivideShared(const TileProblem& problem, const DeviceShape& device, WgmmaLaunch* launch) {
  // On an H200 more gain nothing, and cost up to 2 % with 64 tokens.
  constexpr int kMaxSteps = 5;
  int slots = kMaxSteps * SlotsOfStep(problem.tile_bytes / TileCodeBytes(1), launch->tokens);
  do {
    DivideSharedFor(problem, slots, launch);
  } while (launch->shared_bytes > device.shared_bytes && --slots > 1);
}

/// Divides the steps of a plan's last items among all blocks.
void StreamItems(int streamed, int blocks, WgmmaPlan* plan) {
  WgmmaArguments& args = plan->arguments;
  args.items -= streamed;
  args.streamed = streamed;
  args.run = Ceil(int64_t{streamed} * args.tiles, blocks);
  args.run_inverse = InverseOf(args.run);
  args.tiles_inverse = InverseOf(args.tiles);
  plan->groups = blocks;
}

/// Leaves a plan's last items to a launch of narrower tiles.
void AddTail(const TileProblem& problem, const DeviceShape& device, const Tail& cut,
             WgmmaPlan* plan) {
  WgmmaLaunch tail;
  tail.tokens = cut.tokens;
  tail.arguments = CutItems(cut, plan->tokens, &plan->arguments);
  tail.groups = tail.arguments.items;
  DivideShared(problem, device, &tail);
  plan->tail = tail;
}

}  // namespace

WgmmaPlan PlanWgmmaAs(const TileProblem& problem, const DeviceShape& device,
                      const WgmmaShape& shape) {
  WgmmaPlan plan = PlanWholeTiles(problem, device, shape);
  const StepCost& cost = *CostOfWidth(shape.tokens);
  const int items = plan.arguments.items;
  if (const auto stream = StreamOf(problem, device, cost, items, shape.splits)) {
    StreamItems(stream->items, device.multiprocessors, &plan);
    return plan;
  }
  const auto tail = TailOf(device, cost, plan.arguments.tiles, items, shape.splits);
  if (tail) AddTail(problem, device, *tail, &plan);
  return plan;
}

WgmmaPlan PlanWholeTiles(const TileProblem& problem, const DeviceShape& device,
                         const WgmmaShape& shape) {
  WgmmaPlan plan;
  WgmmaArguments& args = plan.arguments;
  args.blocks = BlocksOf(problem);
  plan.tokens = shape.tokens;
  args.tiles = Ceil(problem.k, kTileK);
  args.splits = shape.splits;
  args.tiles_base = args.tiles / args.splits;
  args.tiles_rest = args.tiles % args.splits;
  const int64_t items = int64_t{Ceil(problem.m, shape.tokens)} * args.blocks;
  args.in_cluster = args.splits > 1 && InCluster(device, plan.tokens, items, args.splits);
  plan.partials = GatesApart(problem) || (args.splits > 1 && !args.in_cluster);
  if (problem.gated && !GatesApart(problem)) args.half_strips = problem.n / 2 / kStripOutputs;
  args.m = problem.m;
  args.token_tiles = Ceil(problem.m, plan.tokens);
  // Their activations stay in the cache while they meet all weights.
  constexpr int kNeighbourTokens = 1024;
  args.neighbours = kNeighbourTokens / plan.tokens;
  args.items = args.token_tiles * args.blocks;
  plan.groups = std::min(args.items, device.multiprocessors / args.splits);
  DivideShared(problem, device, &plan);
  return plan;
}

bool ComparesWithGemv(const TileProblem& problem) {
  return problem.m > kOctet && problem.narrow_codes && !problem.pair_table && !problem.gated &&
         !problem.batch_invariant;
}

bool WgmmaTakesLess(const TileProblem& problem, const DeviceShape& device) {
  // How a microsecond of the one estimate compares with cycles of the other: fitted to 108 products
  // of 36 matrices with 9, 12 and 16 rows of FP4 on an H200 (2026-11-22), of which the sooner one
  // is missed by 0.8 % on average.
  constexpr double kCyclesPerMicrosecond = 2275;
  if (!ComparesWithGemv(problem)) return false;
  const WgmmaShape shape = ChooseWgmmaShape(problem, device);
  const int64_t items = int64_t{Ceil(problem.m, shape.tokens)} * BlocksOf(problem);
  // Another kernel that adds sums costs more than it is reckoned to, with so few rows.
  if (shape.splits > 1 && !InCluster(device, shape.tokens, items, shape.splits)) return false;
  const double cycles = CostOf(problem, device, *CostOfWidth(shape.tokens), items, shape.splits);
  // Other codes of up to 4 bits take longer in both kernels, by about as much.
  TileProblem as_fp4 = problem;
  as_fp4.tile_bytes = TileCodeBytes(4) + kGroupBytes;
  return cycles < kCyclesPerMicrosecond * GemvMicroseconds(as_fp4, PlanGemv(as_fp4, device));
}

int64_t StreamTicketBytes(const WgmmaPlan& plan) {
  const int64_t words = int64_t{plan.arguments.streamed} * kTicketsOfItem;
  return RoundUp(words * int64_t{sizeof(uint32_t)}, int64_t{256});
}

int64_t SumBytes(const TileProblem& problem, const WgmmaPlan& plan) {
  if (plan.partials) return PartialBytes(problem, PartsOf(plan));
  if (plan.arguments.streamed == 0) return 0;
  // Of every block that begins in the middle of an item, and of every item's beginning.
  const int64_t parts = int64_t{plan.groups} + plan.arguments.streamed;
  return StreamTicketBytes(plan) + parts * plan.tokens * kBlockOutputs * int64_t{sizeof(float)};
}

}  // namespace marlin::cuda
