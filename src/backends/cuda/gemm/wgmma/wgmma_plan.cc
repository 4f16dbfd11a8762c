#include "backends/cuda/gemm/wgmma/wgmma_plan.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <vector>

#include "backends/cuda/plan/kernel_family.h"
#include "backends/cuda/plan/tile_waves.h"

namespace marlin::cuda {
namespace {

static_assert(std::size(kH200Costs.wgmma.steps) == std::size(kWgmmaWidths));
static_assert(std::size(kH200Costs.wgmma.sparse_steps) == std::size(kWgmmaWidths));

std::span<const StepCost> StepsOf(const TileProblem& problem, const DeviceShape& device) {
  const WgmmaCosts& costs = device.costs->wgmma;
  return problem.sparse ? costs.sparse_steps : costs.steps;
}

/// Whether gates and ups begin at whole pairs of n-tiles.
bool HalvesAligned(const TileProblem& problem) { return problem.n % kBlockOutputs == 0; }

/// Blocks of 128 outputs, or of 64 gates and their ups.
int BlocksOf(const TileProblem& problem) {
  return problem.gated && HalvesAligned(problem) ? Ceil(problem.n / 2, kBlockOutputs / 2)
                                                 : Ceil(problem.n, kBlockOutputs);
}

/// Whether split-K is reduced in clusters: all of them must run at once, and every CTA must have a
/// part of the sums to finish.
bool InCluster(const DeviceShape& device, int tokens, int64_t items, int splits) {
  return tokens <= kMaxClusterTokens && splits <= tokens / 8 &&
         items <= device.clusters[splits - 1];
}

/// Whether split-K leaves at least four k-iterations per CTA, and one wave of CTAs.
bool CanSplit(const TileProblem& problem, const DeviceShape& device, int tokens, int64_t items,
              int splits) {
  constexpr int kLeastTiles = 4;
  return !problem.batch_invariant && Ceil(problem.k, kTileK) >= splits * kLeastTiles &&
         (InCluster(device, tokens, items, splits) || items * splits <= device.multiprocessors);
}

/// Null where the device has no costs for this tile_m.
const StepCost* CostOfWidth(const TileProblem& problem, const DeviceShape& device, int tokens) {
  const std::span<const StepCost> costs = StepsOf(problem, device);
  const auto found = std::ranges::find(costs, tokens, &StepCost::tokens);
  return found == costs.end() ? nullptr : &*found;
}

/// None with split-K, which fills the device.
std::optional<Tail> TailOf(const TileProblem& problem, const DeviceShape& device,
                           const StepCost& cost, int tiles, int64_t items, int splits) {
  if (splits > 1) return std::nullopt;
  return TailOf(StepsOf(problem, device), cost, device, tiles, items);
}

/// Whether gates and ups are in different CTAs, so that their sums go to the workspace.
bool GatesApart(const TileProblem& problem) { return problem.gated && !HalvesAligned(problem); }

/// Stream-K for the tail wave, where that is faster than another wave of whole tiles or a tail
/// launch.
std::optional<Stream> StreamOf(const TileProblem& problem, const DeviceShape& device,
                               const StepCost& cost, int64_t items, int splits) {
  if (splits > 1 || problem.batch_invariant || GatesApart(problem)) return std::nullopt;
  const int tiles = Ceil(problem.k, kTileK);
  const double otherwise = CyclesOf(cost, device.multiprocessors, tiles, items,
                                    TailOf(problem, device, cost, tiles, items, splits));
  const auto streamed = StreamOf(cost, device, tiles, items);
  return streamed && streamed->cycles < otherwise ? streamed : std::nullopt;
}

double CostOf(const TileProblem& problem, const DeviceShape& device, const StepCost& cost,
              int64_t items, int splits) {
  const int tiles = Ceil(Ceil(problem.k, kTileK), splits);
  if (const auto stream = StreamOf(problem, device, cost, items, splits)) return stream->cycles;
  const auto tail = TailOf(problem, device, cost, tiles, items, splits);
  const double cycles = CyclesOf(cost, device.multiprocessors, tiles, items * splits, tail);
  if (splits == 1) return cycles;
  const WgmmaCosts& costs = device.costs->wgmma;
  if (!InCluster(device, cost.tokens, items, splits)) {
    const double sums = double{1} * problem.m * problem.n * splits;
    return cycles + costs.memory + cost.tokens * costs.memory_token + sums * costs.memory_sum;
  }
  const double per_block = costs.cluster_block + cost.tokens * costs.cluster_token;
  const double sum = cycles + costs.cluster + splits * per_block;
  const bool crowded =
      splits > 2 && static_cast<double>(items) > costs.crowded_from * device.clusters[splits - 1];
  return crowded ? sum * costs.crowded : sum;
}

}  // namespace

WgmmaShape ChooseWgmmaShape(const TileProblem& problem, const DeviceShape& device) {
  const int blocks = BlocksOf(problem);
  WgmmaShape best = {256, 1};
  double best_cost = 0;
  for (const StepCost& cost : StepsOf(problem, device)) {
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
  if (CostOfWidth(problem, device, shape.tokens) == nullptr) return false;
  if (shape.splits == 1) return true;
  const int64_t items = int64_t{Ceil(problem.m, shape.tokens)} * BlocksOf(problem);
  return shape.splits > 1 && shape.splits <= kMaxSplits &&
         CanSplit(problem, device, shape.tokens, items, shape.splits);
}

WgmmaPlan PlanWgmma(const TileProblem& problem, const DeviceShape& device) {
  return PlanWgmmaAs(problem, device, ChooseWgmmaShape(problem, device));
}

namespace {

/// Lays out shared memory with `slots` pipeline stages of activations.
void DivideSharedFor(const TileProblem& problem, int slots, WgmmaLaunch* launch) {
  WgmmaArguments& args = launch->arguments;
  const int slots_of_step = SlotsOfStep(problem.tile_bytes / TileCodeBytes(1), launch->tokens);
  const int reduction_buffer =
      args.in_cluster ? ReductionBufferBytes(launch->tokens, args.splits) : 0;
  args.slots = slots;
  args.weight_slots = Ceil(slots, slots_of_step);
  args.weights_offset = slots * (StepActivationBytes(launch->tokens) / slots_of_step);
  args.exchange_offset =
      args.weights_offset + args.weight_slots * kStripsOfBlock * problem.tile_bytes;
  args.reduction_offset = args.exchange_offset + kExchangeBytes;
  args.barriers_offset = args.reduction_offset + reduction_buffer;
  launch->shared_bytes = args.barriers_offset + (slots * 2 + 1) * kBarrierBytes;
}

}  // namespace

void DivideShared(const TileProblem& problem, const DeviceShape& device, WgmmaLaunch* launch) {
  // On an H200 more gain nothing, and cost up to 2 % with 64 tokens.
  constexpr int kMaxSteps = 5;
  int slots = kMaxSteps * SlotsOfStep(problem.tile_bytes / TileCodeBytes(1), launch->tokens);
  do {
    DivideSharedFor(problem, slots, launch);
  } while (launch->shared_bytes > device.shared_bytes && --slots > 1);
}

namespace {

/// Stream-K: divides the k-iterations of a plan's last output tiles among all CTAs.
void StreamItems(int streamed, int blocks, WgmmaPlan* plan) {
  WgmmaArguments& args = plan->arguments;
  args.items -= streamed;
  args.streamed = streamed;
  args.run = Ceil(int64_t{streamed} * args.tiles, blocks);
  args.run_inverse = InverseOf(args.run);
  args.tiles_inverse = InverseOf(args.tiles);
  plan->groups = blocks;
}

/// Leaves a plan's last output tiles to a launch with a smaller tile_m.
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
  const StepCost& cost = *CostOfWidth(problem, device, shape.tokens);
  const int items = plan.arguments.items;
  if (const auto stream = StreamOf(problem, device, cost, items, shape.splits)) {
    StreamItems(stream->items, device.multiprocessors, &plan);
    return plan;
  }
  const auto tail = TailOf(problem, device, cost, plan.arguments.tiles, items, shape.splits);
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
  // The activations of a rasterization group stay in the L2 cache while all weights stream by.
  constexpr int kNeighbourTokens = 1024;
  args.neighbours = kNeighbourTokens / plan.tokens;
  args.items = args.token_tiles * args.blocks;
  plan.groups = std::min(args.items, device.multiprocessors / args.splits);
  DivideShared(problem, device, &plan);
  return plan;
}

namespace {

/// Whether the estimates of this kernel and of the GEMV kernel were fitted to each other for such a
/// problem: from nine rows on, for codes that are as cheap to decode in both.
bool IsFittedToGemv(const TileProblem& problem) {
  constexpr int kFittedFrom = 8;
  return problem.m > kFittedFrom && problem.narrow_codes && !problem.pair_table && !problem.gated;
}

double WgmmaMicroseconds(const GemmDesc& desc, const DeviceShape& device) {
  // Far beyond the errors of either estimate: elsewhere the GEMV kernel is the faster one wherever
  // it has been measured.
  constexpr double kUnfitted = 100;
  const TileProblem problem = TileProblemOf(desc);
  const WgmmaShape shape = ChooseWgmmaShape(problem, device);
  const int64_t items = int64_t{Ceil(problem.m, shape.tokens)} * BlocksOf(problem);
  const double cycles =
      CostOf(problem, device, *CostOfWidth(problem, device, shape.tokens), items, shape.splits);
  const double micros = cycles / device.costs->wgmma.cycles_per_microsecond;
  // At small m the model underestimates the separate split-K reduction.
  const bool reduces = shape.splits > 1 && !InCluster(device, shape.tokens, items, shape.splits);
  return IsFittedToGemv(problem) && !reduces ? micros : kUnfitted * micros;
}

KernelVariant ChooseVariant(const TileProblem& problem, const DeviceShape& device) {
  const WgmmaShape shape = ChooseWgmmaShape(problem, device);
  return {shape.tokens, shape.splits};
}

bool CanRunVariant(const GemmDesc& desc, const DeviceShape& device, const KernelVariant& variant) {
  return CanPlanWgmmaAs(TileProblemOf(desc), device, {variant.width, variant.splits});
}

std::vector<KernelVariant> Variants(const GemmDesc& desc, const DeviceShape& device) {
  const TileProblem problem = TileProblemOf(desc);
  std::vector<KernelVariant> variants = {ChooseVariant(problem, device)};
  for (const int width : kWgmmaWidths) {
    // A larger tile_m whose tiles are half empty or more only costs more.
    if (width > kWgmmaWidths[0] && width / 2 >= desc.m) break;
    for (int splits = 1; splits <= kMaxSplits; ++splits) {
      const KernelVariant variant = {width, splits};
      if (variant == variants.front() || !CanRunVariant(desc, device, variant)) continue;
      variants.push_back(variant);
    }
  }
  return variants;
}

}  // namespace

const KernelFamily& WgmmaFamily() {
  static constexpr KernelFamily kFamily = {.microseconds = WgmmaMicroseconds,
                                           .variants = Variants,
                                           .can_run_as = CanRunVariant,
                                           .available = NeedsWgmma};
  return kFamily;
}

Support SupportsWgmma(const GemmDesc& desc, const DeviceProperties& device) {
  if (const Support support = NeedsWgmma(device); !support.ok()) return support;
  return SupportsTiles(desc);
}

Support SupportsSparseWgmma(const GemmDesc& desc, const DeviceProperties& device) {
  if (const Support support = NeedsWgmma(device); !support.ok()) return support;
  return SupportsTiles(desc, true);
}

int64_t StreamCounterBytes(const WgmmaPlan& plan) {
  const int64_t words = int64_t{plan.arguments.streamed} * kCountersPerTile;
  return RoundUp(words * int64_t{sizeof(uint32_t)}, int64_t{256});
}

int64_t SumBytes(const TileProblem& problem, const WgmmaPlan& plan) {
  if (plan.partials) return PartialBytes(problem, PartsOf(plan));
  if (plan.arguments.streamed == 0) return 0;
  // One for every CTA that begins in the middle of an output tile, one for every tile's beginning.
  const int64_t parts = int64_t{plan.groups} + plan.arguments.streamed;
  return StreamCounterBytes(plan) + parts * plan.tokens * kBlockOutputs * int64_t{sizeof(float)};
}

}  // namespace marlin::cuda
