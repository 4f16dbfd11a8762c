#include "backends/cuda/gemm/gemv/gemv_plan.h"

#include <algorithm>
#include <bit>

#include "backends/cuda/layout/sparse_layout.h"
#include "backends/cuda/plan/kernel_family.h"

namespace marlin::cuda {
namespace {

/// Padding of rows of activations, so that the rows of an ldmatrix begin in different banks.
constexpr int kActivationPadding = 16;

/// The most units of a CTA.
int UnitsOfBlock(const GemvArguments& args) {
  return args.units_base + (args.units_rest > 0 ? 1 : 0);
}

/// Spreads the copies of rows of activations over the warps.
void SpreadCopies(GemvPlan* plan) {
  GemvArguments& args = plan->arguments;
  constexpr int kMostRowsApart = 32;
  args.row_mask =
      static_cast<int>(std::bit_floor(static_cast<unsigned>(std::min(args.m, kMostRowsApart)))) - 1;
  args.piece_factor = Ceil(1 << 16, args.m);
  const int step = plan->warps * args.multicast;
  args.step_pieces = step / args.m;
  args.step_rows = step % args.m;
}

/// Parts of a CTA's activations. Without TMA every thread arrives at the mbarrier of each part,
/// which few activations do not pay for.
int MostPieces(const GemvArguments& args) {
  constexpr int64_t kFewActivations = 32 * 1024;
  const int64_t bytes = int64_t{args.tiles_of_split} * kTileK * 2 * args.m;
  return bytes > kFewActivations ? kMaxPieces : 1;
}

/// Lays out shared memory; false when it does not suffice.
bool DivideShared(const TileProblem& problem, const DeviceShape& device, GemvPlan* plan) {
  GemvArguments& args = plan->arguments;
  const int most_pieces = device.has_tma() ? kMaxPieces : MostPieces(args);
  args.piece_log2 = 0;
  while (args.tiles_of_split > most_pieces << args.piece_log2) ++args.piece_log2;
  args.pieces = Ceil(args.tiles_of_split, 1 << args.piece_log2);
  const int64_t row_bytes = int64_t{args.tiles_of_split} * kTileK * 2 + kActivationPadding;
  const int64_t slot_bytes = int64_t{plan->strips} * problem.tile_bytes;
  const int64_t ring = RoundUp(plan->warps * args.stages * slot_bytes, int64_t{128});
  const int64_t activations = RoundUp(row_bytes * problem.m, int64_t{16});
  const int64_t sums = int64_t{plan->warps} * kSumFloats * 4;
  const int64_t strips = int64_t{UnitsOfBlock(args)} * plan->strips;
  const int64_t slots = args.in_cluster ? RoundUp(strips, int64_t{args.splits}) : 0;
  const int64_t reduction_buffer =
      args.in_cluster ? kReductionBarrierBytes + slots * problem.m * kStripOutputs * 4 : 0;
  const int64_t barriers = (kMaxPieces + int64_t{plan->warps} * args.stages) * kBarrierBytes;
  const int64_t table = problem.pair_table ? kPairTableBytes : 0;
  const int64_t total = ring + activations + sums + reduction_buffer + table + barriers;
  if (total > device.shared_bytes) return false;
  args.row_bytes = static_cast<int>(row_bytes);
  args.activations_offset = static_cast<int>(ring);
  args.sums_offset = args.activations_offset + static_cast<int>(activations);
  args.reduction_offset = args.sums_offset + static_cast<int>(sums);
  args.table_offset = args.reduction_offset + static_cast<int>(reduction_buffer);
  args.barriers_offset = args.table_offset + static_cast<int>(table);
  // More than half of shared memory: CTAs of the next launch, which may begin early (PDL), would
  // spread unevenly over the multiprocessors if two fitted on one.
  plan->shared_bytes = std::max(static_cast<int>(total), device.shared_bytes / 2 + 1);
  return true;
}

/// The costs of a plan: the device's table at its tiling.
struct PlanCosts {
  double step;
  double tile;
  double memory_tile;
  double round;
  double reduction;
  double reduction_split;
  double reduction_strip;

  PlanCosts(const TileProblem& problem, const DeviceShape& device, const GemvPlan& plan) {
    const GemvCosts& costs = device.costs->gemv;
    const bool wide = plan.strips > 1;
    const bool two_n8_tiles = problem.m > kOctet;
    const double bytes = problem.tile_bytes / costs.tile_bytes;
    step = bytes * costs.step[wide ? 1 : 0][plan.warps > 8 ? 1 : 0];
    tile = bytes * plan.strips * costs.tile[two_n8_tiles ? 1 : 0];
    memory_tile = bytes * plan.strips * costs.memory_tile;
    round = costs.round[wide || two_n8_tiles ? 1 : 0];
    const GemvCosts::Reduction& reduction_costs =
        plan.arguments.in_cluster ? costs.cluster : costs.memory;
    reduction = reduction_costs.fixed;
    reduction_split = reduction_costs.split;
    reduction_strip = reduction_costs.strip[two_n8_tiles ? 1 : 0];
  }
};

/// How many units a CTA computes concurrently: a unit's warps wait for each other at its end, but
/// with few warps per unit some are idle at the end of the CTA.
int UnitsAtATime(int units_of_block, int tiles, int warps, const PlanCosts& costs) {
  // Where the costs differ by less, fewer units are faster as often.
  constexpr double kWorthwhile = 0.97;
  double least = 0;
  int best = 1;
  for (int lanes = 1; lanes <= std::min(std::max(warps / 2, 1), units_of_block); lanes *= 2) {
    const int rounds = Ceil(units_of_block, lanes);
    const double cost = rounds * (Ceil(tiles, warps / lanes) * costs.step + costs.round);
    if (least != 0 && cost > kWorthwhile * least) continue;
    least = cost;
    best = lanes;
  }
  return best;
}

void ShareUnits(int lanes, GemvPlan* plan) {
  GemvArguments& args = plan->arguments;
  args.share = plan->warps / lanes;
  args.lanes_log2 = std::countr_zero(static_cast<unsigned>(lanes));
  args.share_log2 = std::countr_zero(static_cast<unsigned>(args.share));
}

/// CTAs along n that run at once, in whole clusters.
int BlocksAtOnce(const GemvArguments& args, const DeviceShape& device) {
  if (args.in_cluster) return device.clusters[args.splits * args.multicast - 1] * args.multicast;
  const int blocks = args.multicast == 1 ? device.multiprocessors
                                         : device.clusters[args.multicast - 1] * args.multicast;
  return std::max(blocks / args.splits, args.multicast);
}

int MostStages(const DeviceShape& device) { return device.has_tma() ? kMaxBulkStages : kMaxStages; }

}  // namespace

int64_t SplitWorkspaceBytes(const GemvPlan& plan) {
  const int64_t strips = int64_t{UnitsOf(plan)} * plan.strips;
  const int64_t sums = strips * plan.splits * plan.arguments.m * kStripOutputs;
  return (CounterWords(plan) + sums) * int64_t{sizeof(float)};
}

std::optional<GemvPlan> PlanGemvAs(const TileProblem& problem, const DeviceShape& device,
                                   const GemvShape& shape) {
  if (shape.stages > MostStages(device)) return std::nullopt;
  if (!device.has_multicast() && shape.multicast > 1) return std::nullopt;
  GemvPlan plan;
  GemvArguments& args = plan.arguments;
  args.m = problem.m;
  args.k = problem.k;
  args.stages = shape.stages;
  args.first_stages = device.has_tma() ? shape.first_stages : 1;
  args.tiles = Ceil(problem.k, kTileK);
  args.tiles_of_split = Ceil(args.tiles, shape.splits);
  args.splits = Ceil(args.tiles, args.tiles_of_split);
  args.multicast = shape.multicast;
  args.bulk = device.has_tma() && problem.k % 8 == 0;
  const bool ctas_reduce = args.splits > 1 && args.splits <= kMaxSplits && !problem.gated;
  plan.in_memory = ctas_reduce && (shape.in_memory || !device.has_tma());
  args.in_cluster = ctas_reduce && !plan.in_memory;
  plan.warps = shape.warps;
  plan.strips = shape.strips;
  plan.splits = args.splits;
  plan.partials = problem.gated || (args.splits > 1 && !args.in_cluster);

  const int units = Ceil(problem.n, kStripOutputs * plan.strips);
  // A CTA without units still takes part in its multicast group.
  const int blocks =
      std::clamp(BlocksAtOnce(args, device) / args.multicast * args.multicast, 1, units);
  plan.groups = static_cast<int>(RoundUp(blocks, int64_t{args.multicast}));
  args.units_base = units / plan.groups;
  args.units_rest = units % plan.groups;
  const PlanCosts costs(problem, device, plan);
  ShareUnits(UnitsAtATime(UnitsOfBlock(args), args.tiles_of_split, plan.warps, costs), &plan);
  SpreadCopies(&plan);
  if (!DivideShared(problem, device, &plan)) return std::nullopt;
  return plan;
}

namespace {

/// How the CTAs of a launch work together: clusters and multicast groups.
void ShareAmongBlocks(const TileProblem& problem, const DeviceShape& device, GemvShape* shape) {
  const int splits = shape->splits;
  const int strips = Ceil(problem.n, kStripOutputs);
  const int strips_of_block = Ceil(int64_t{strips} * splits, device.multiprocessors);
  // Clusters are fast where as many of them run at once as there is work for.
  const bool clusters = splits > 1 && splits <= kMaxSplits;
  shape->in_memory =
      clusters && device.clusters[splits - 1] < std::min(strips, device.multiprocessors / splits);
  // Multicast pays from here on, but not where it reduces the CTAs that run at once.
  const bool many_blocks = int64_t{strips} * splits * 2 >= device.multiprocessors;
  const int64_t least_shared = many_blocks && problem.m > 1 ? 24 * 1024 : 56 * 1024;
  const bool share = device.has_multicast() && problem.k % 8 == 0 && strips > 1 &&
                     splits <= kMaxSplits && int64_t{problem.m} * problem.k * 2 >= least_shared;
  const bool pairs_of_clusters =
      splits * 2 <= kMaxSplits && strips <= device.clusters[splits * 2 - 1] * 2;
  // Two splits with few n-tiles give up their cluster for it.
  constexpr int kFewStrips = 4;
  if (share && splits == 2 && !pairs_of_clusters && strips_of_block <= kFewStrips) {
    shape->in_memory = true;
  }
  const bool in_cluster = clusters && !shape->in_memory;
  shape->multicast = share && (!in_cluster || pairs_of_clusters) ? 2 : 1;
}

/// A tile configuration with `splits` parts of k and these warps and n-tiles per unit. All of these
/// heuristics were measured on an H200.
GemvShape ShapeOf(const TileProblem& problem, const DeviceShape& device, int splits, int warps,
                  int unit_strips) {
  const int strips = Ceil(problem.n, kStripOutputs);
  const int tiles_of_split = Ceil(Ceil(problem.k, kTileK), splits);
  const int strips_of_block = Ceil(int64_t{strips} * splits, device.multiprocessors);
  GemvShape shape;
  shape.splits = splits;
  shape.warps = warps;
  shape.strips = unit_strips;
  const int tiles_of_warp = Ceil(int64_t{strips_of_block} * tiles_of_split, shape.warps);
  if (!device.has_tma()) {
    shape.in_memory = splits > 1;
    shape.stages = std::clamp(Ceil(tiles_of_warp, unit_strips), 1, kMaxStages);
    return shape;
  }
  ShareAmongBlocks(problem, device, &shape);
  // Two stages keep memory busy; one does where a warp has few or large tiles.
  const bool light = problem.m <= kOctet || (splits == 2 && shape.in_memory);
  const bool deep = problem.tile_bytes <= 3072 && light && tiles_of_warp > 2;
  shape.stages = deep ? 2 : 1;
  const bool in_cluster = splits > 1 && splits <= kMaxSplits && !shape.in_memory;
  shape.first_stages = unit_strips > 1 || in_cluster ? shape.stages : 1;
  return shape;
}

/// Units of two n-tiles are for one n8 tile of tokens and small tiles.
bool CanBeWide(const TileProblem& problem) { return problem.narrow_codes && problem.m <= kOctet; }

/// The default tile configuration with `splits` parts of k.
GemvShape UsualShape(const TileProblem& problem, const DeviceShape& device, int splits) {
  const int tiles_of_split = Ceil(Ceil(problem.k, kTileK), splits);
  const int strips_of_block =
      Ceil(int64_t{Ceil(problem.n, kStripOutputs)} * splits, device.multiprocessors);
  // With wide units warps wait for each other less often, but only matrices with enough n-tiles
  // have enough such units.
  const int strips = CanBeWide(problem) && strips_of_block > 4 ? 2 : 1;
  const int warps = tiles_of_split <= kMostGemvWarps / 2 ? kMostGemvWarps / 2 : kMostGemvWarps;
  return ShapeOf(problem, device, splits, warps, strips);
}

/// The fewest splits that occupy the multiprocessors with clusters.
int FewestSplits(const TileProblem& problem, const DeviceShape& device) {
  constexpr int kTilesOfSplit = 8;
  const int strips = Ceil(problem.n, kStripOutputs);
  const int most = std::clamp(Ceil(problem.k, kTileK) / kTilesOfSplit, 1, kMaxSplits);
  int splits = std::clamp(device.multiprocessors / strips, 1, most);
  while (device.has_tma() && splits > 1 && device.clusters[splits - 1] < strips) --splits;
  return splits;
}

/// The next larger number of splits, after one that does not fit: from three on, the activations of
/// a CTA should fill only half of shared memory, because every CTA copies its own.
int MoreSplits(const TileProblem& problem, const DeviceShape& device, int splits) {
  if (splits < 2) return splits + 1;
  return std::max(splits + 1, Ceil(int64_t{problem.m} * problem.k * 2, device.shared_bytes / 2));
}

/// How often the warps of a CTA begin a unit.
int RoundsOf(const GemvPlan& plan) {
  return Ceil(UnitsOfBlock(plan.arguments), 1 << plan.arguments.lanes_log2);
}

/// The plan with as many stages as shared memory allows.
std::optional<GemvPlan> DeepestPlan(const TileProblem& problem, const DeviceShape& device,
                                    const GemvShape& shape) {
  // Memory requests are served in order: tiles requested before the activations delay these. Few
  // activations arrive soon all the same, and the tiles keep memory busy until they are requested.
  constexpr int64_t kFewActivations = 16 * 1024;
  for (int stages = shape.stages; stages > 0; --stages) {
    GemvShape shallow = shape;
    shallow.stages = stages;
    shallow.first_stages = std::min(stages, shape.first_stages);
    auto plan = PlanGemvAs(problem, device, shallow);
    if (!plan) continue;
    if (device.has_tma() && int64_t{problem.m} * problem.k * 2 <= kFewActivations &&
        RoundsOf(*plan) == 1) {
      plan->arguments.first_stages = stages;
    }
    return plan;
  }
  return std::nullopt;
}

/// Without TMA: the plan with the most warps that have two stages. Two stages for half of the warps
/// are worth more than one for all, and wide units are worth nothing with one.
std::optional<GemvPlan> PlanByLanes(const TileProblem& problem, const DeviceShape& device,
                                    int splits, int most_warps, int unit_strips) {
  std::optional<GemvPlan> shallow;
  for (const int warps : {most_warps, most_warps / 2}) {
    const GemvShape shape = ShapeOf(problem, device, splits, warps, unit_strips);
    const auto plan = DeepestPlan(problem, device, shape);
    if (!plan) continue;
    if (plan->arguments.stages >= std::min(shape.stages, 2)) return plan;
    if (!shallow && unit_strips == 1) shallow = plan;
  }
  return shallow;
}

/// The plan with the fewest splits that occupy the device and fit.
GemvPlan UsualPlan(const TileProblem& problem, const DeviceShape& device) {
  for (int splits = FewestSplits(problem, device);; splits = MoreSplits(problem, device, splits)) {
    GemvShape shape = UsualShape(problem, device, splits);
    if (!device.has_tma()) {
      for (int strips = shape.strips; strips > 0; --strips) {
        const auto plan = PlanByLanes(problem, device, splits, shape.warps, strips);
        if (plan) return *plan;
      }
      continue;
    }
    // With wide units, two stages for half of the warps are worth more than one for all.
    const bool halve = shape.strips == 2 && shape.stages == 2;
    if (halve && !PlanGemvAs(problem, device, shape)) shape.warps /= 2;
    for (const int warps : {shape.warps, shape.warps / 2}) {
      shape.warps = warps;
      if (const auto plan = DeepestPlan(problem, device, shape)) return *plan;
    }
  }
}

}  // namespace

double GemvMicroseconds(const TileProblem& problem, const DeviceShape& device,
                        const GemvPlan& plan) {
  const GemvArguments& args = plan.arguments;
  const PlanCosts costs(problem, device, plan);
  const int units = UnitsOfBlock(args);
  const double activations = double{kTileK * 2} * args.tiles_of_split * problem.m;
  // Where memory bounds all CTAs, those that end early leave their share of it to the others.
  const double busiest = units * args.tiles_of_split * costs.tile;
  const double average =
      double{1} * UnitsOf(plan) * args.tiles / device.multiprocessors * costs.memory_tile;
  double micros =
      RoundsOf(plan) * (Ceil(args.tiles_of_split, args.share) * costs.step + costs.round) +
      std::max(busiest, average) + activations * device.costs->gemv.activation;
  if (args.multicast > 1) micros += device.costs->gemv.shared_copies;
  if (plan.splits > 1) {
    micros += costs.reduction + plan.splits * costs.reduction_split +
              units * plan.strips * costs.reduction_strip;
  }
  return micros;
}

GemvPlan PlanGemv(const TileProblem& problem, const DeviceShape& device) {
  // Accuracy of the cost model: where it predicts a smaller gain, the default plan is faster as
  // often.
  constexpr double kWorthwhile = 0.96;
  constexpr int64_t kLeastTiles = 1024;  ///< For fewer tiles the cost model is unreliable.
  constexpr int kSplitsToCompare = 4;
  GemvPlan best = UsualPlan(problem, device);
  const int64_t strips = Ceil(problem.n, kStripOutputs);
  if (strips * best.arguments.tiles < kLeastTiles) return best;
  double least = kWorthwhile * GemvMicroseconds(problem, device, best);
  const auto compare = [&](int splits, int unit_strips) {
    std::optional<GemvPlan> plan;
    if (!device.has_tma()) plan = PlanByLanes(problem, device, splits, kMostGemvWarps, unit_strips);
    for (int warps = kMostGemvWarps; device.has_tma() && !plan && warps >= kMostGemvWarps / 2;
         warps /= 2) {
      const GemvShape shape = ShapeOf(problem, device, splits, warps, unit_strips);
      plan = DeepestPlan(problem, device, shape);
    }
    if (!plan) return;
    const double micros = GemvMicroseconds(problem, device, *plan);
    if (micros >= least) return;
    least = micros;
    best = *plan;
  };
  if (CanBeWide(problem)) compare(1, 2);
  for (int splits = 1; splits <= kSplitsToCompare; ++splits) compare(splits, 1);
  return best;
}

namespace {

double ProblemMicroseconds(const GemmDesc& desc, const DeviceShape& device) {
  // The estimate is compared with the WGMMA kernel's, to which it was fitted with FP4: other codes
  // of up to 4 bits take longer in both kernels, by about as much.
  TileProblem as_fp4 = TileProblemOf(desc);
  as_fp4.tile_bytes = TileCodeBytes({CodeKind::kFp4, desc.weights.sparse}) + kGroupBytes;
  return GemvMicroseconds(as_fp4, device, PlanGemv(as_fp4, device));
}

}  // namespace

const KernelFamily& GemvFamily() {
  static constexpr KernelFamily kFamily = {ProblemMicroseconds, nullptr, nullptr};
  return kFamily;
}

namespace {

Support SupportsRows(const GemmDesc& desc, bool sparse) {
  if (desc.m > kMaxGemvRows) return {"takes up to {0} rows", kMaxGemvRows};
  if (desc.determinism == Determinism::kBatchInvariant) return {"its split-K depends on m"};
  return SupportsTiles(desc, sparse);
}

}  // namespace

Support SupportsGemv(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  return SupportsRows(desc, false);
}

Support SupportsSparseGemv(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  return SupportsRows(desc, true);
}

}  // namespace marlin::cuda
