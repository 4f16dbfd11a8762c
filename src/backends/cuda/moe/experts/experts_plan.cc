#include "backends/cuda/moe/experts/experts_plan.h"

#include <algorithm>

#include "backends/cuda/gemm/gemv/gemv_layout.h"
#include "backends/cuda/gemm/mma/mma_plan.h"
#include "backends/cuda/gemm/wgmma/wgmma_plan.h"

namespace marlin::cuda {
namespace {

constexpr int kMaxExpertStages = 2;

/// log2 of the warps, of `warps`, that split k: the most that have three tiles each, because a
/// unit's end takes as long as a tile, and of which at most a third idles on the last tiles.
int ShareLog2For(int tiles, int warps) {
  constexpr int kLeastTiles = 3;
  int best = 0;
  for (int log2 = 1; 1 << log2 <= warps && tiles >> log2 >= kLeastTiles; ++log2) {
    const int rounds = Ceil(tiles, 1 << log2);
    if (3 * rounds * (1 << log2) <= 4 * tiles) best = log2;
  }
  return best;
}

/// Lays out shared memory.
struct SharedLayout {
  int bytes = 0;

  int Add(int64_t size) {
    const int offset = bytes;
    bytes += static_cast<int>(RoundUp(size, int64_t{128}));
    return offset;
  }
};

/// Rows per expert from which on the WGMMA kernel is the faster one. On an H200 the GEMV kernel
/// takes 0.85 of its time for 8 rows of 2048 x 768, 0.93 for 12 and 1.17 for 16, of 2880 x 2880
/// 0.79 for 8; of 7168 x 2048 as long for 8 rows, and of 4096 x 14336 for 6. All with codes of 4
/// bits.
int64_t LeastRowsOfWgmma(const ExpertTilesProblem& problem) {
  constexpr int64_t kManyWeights = int64_t{12} << 20;
  return CodeBits(problem.kind) <= 4 && problem.matrix_weights < kManyWeights ? 13 : 6;
}

/// Rows of a pipeline stage of the WGMMA kernel: most experts, whose numbers of rows differ, have
/// one tile. A stage with more rows leaves room for fewer stages.
int TileRowsFor(const ExpertTilesProblem& problem) {
  const int most = MaxTileRows(CodeBits(problem.kind));
  int width = 0;
  while (RowsOfWidth(width) < most && RowsOfWidth(width) < 2 * problem.rows_per_expert) ++width;
  return RowsOfWidth(width);
}

/// The plan with a number of warps per CTA.
std::optional<ExpertGemvPlan> PlanGemvOf(const ExpertTilesProblem& problem,
                                         const DeviceShape& device, int warps) {
  ExpertGemvPlan plan;
  ExpertGemvArguments& args = plan.arguments;
  args.weights = problem.weights;
  args.sides = problem.sides;
  args.warps = warps;
  args.share_log2 = ShareLog2For(problem.weights.tiles_of_strip, warps);
  // 16 bytes of padding, so that the rows of a matrix are in different banks.
  const int64_t row_bytes = int64_t{problem.weights.tiles_of_strip} * kTileK * 2 + 16;
  if (row_bytes > device.shared_bytes) return std::nullopt;
  args.row_bytes = static_cast<int>(row_bytes);
  for (args.stages = kMaxExpertStages; args.stages > 0; --args.stages) {
    SharedLayout layout;
    layout.Add(int64_t{warps} * args.stages * problem.weights.tile_bytes);
    args.barriers_offset = layout.Add(int64_t{warps} * args.stages * kBarrierBytes);
    args.sums_offset = layout.Add(int64_t{2} * warps * kSumFloats * 4);
    args.table_offset = layout.Add(problem.kind == CodeKind::kTable4 ? kPairTableBytes : 0);
    args.schedule_offset = layout.Add(ScheduleBytes(problem.experts, 1));
    args.own_sort_offset = layout.Add(problem.own_sort_bytes);
    const int64_t fit = (device.shared_bytes - layout.bytes) / args.row_bytes;
    // With one stage a warp waits for every tile: better than reading weights again for each row.
    if (fit < (args.stages > 1 ? kOctet : 1)) continue;
    // With eight rows on average, half of the experts have more, and would read their weights
    // twice.
    plan.octets = problem.rows_per_expert >= kOctet && fit >= 2 * kOctet ? 2 : 1;
    args.tile_rows = static_cast<int>(std::min<int64_t>(fit, plan.octets * kOctet));
    args.rows_offset = layout.Add(int64_t{args.tile_rows} * args.row_bytes);
    plan.shared_bytes = layout.bytes;
    if (plan.shared_bytes > device.shared_bytes) continue;
    return plan;
  }
  return std::nullopt;
}

/// Warps per CTA of the GEMV kernel: the most whose rings leave room for eight rows, or else for
/// the most rows, each of which reads the weights; 0: for not even one row. It is the same for any
/// number of rows, because sums depend on it. On Hopper it is kExpertWarps, for which the kernel is
/// compiled there.
int GemvWarpsFor(const ExpertTilesProblem& problem, const DeviceShape& device) {
  constexpr int kLeastWarps = 4;
  if (device.has_wgmma) return kExpertWarps;
  ExpertTilesProblem any = problem;
  any.rows_per_expert = 1;
  any.own_sort_bytes = OwnSortBytes(kMostOwnSelections);
  int best = 0;
  int most = 0;
  for (int warps = kExpertWarps; warps >= kLeastWarps; warps /= 2) {
    const auto plan = PlanGemvOf(any, device, warps);
    if (!plan || plan->arguments.tile_rows <= most) continue;
    most = plan->arguments.tile_rows;
    best = warps;
  }
  return best;
}

}  // namespace

std::optional<ExpertGemvPlan> PlanExpertGemv(const ExpertTilesProblem& problem,
                                             const DeviceShape& device) {
  const int warps = GemvWarpsFor(problem, device);
  if (warps == 0) return std::nullopt;
  return PlanGemvOf(problem, device, warps);
}

std::optional<ExpertWgmmaPlan> PlanExpertWgmma(const ExpertTilesProblem& problem, bool gated,
                                               const DeviceShape& device) {
  if (!device.has_wgmma || problem.rows_per_expert < LeastRowsOfWgmma(problem) ||
      problem.weights.tiles_of_strip == 0) {
    return std::nullopt;
  }
  const int64_t schedule = TileScheduleBytes(problem.experts, problem.sides);
  // With 16 bytes for the alignment of what follows the pipeline.
  const int64_t own = schedule + (gated ? kGatedExchangeBytes : 0) + 16;
  if (own >= device.shared_bytes) return std::nullopt;
  DeviceShape rest = device;
  rest.shared_bytes -= static_cast<int>(own);
  TileProblem tiles;
  tiles.tile_bytes = problem.weights.tile_bytes;
  WgmmaLaunch launch;
  launch.tokens = TileRowsFor(problem);
  DivideShared(tiles, rest, &launch);
  if (launch.shared_bytes > rest.shared_bytes) return std::nullopt;
  ExpertWgmmaPlan plan;
  plan.arguments.gemm = launch.arguments;
  plan.arguments.gemm.weights = problem.weights;
  plan.arguments.gemm.tiles = problem.weights.tiles_of_strip;
  plan.arguments.gemm.half_strips = gated ? 1 : 0;
  plan.arguments.tile_rows = launch.tokens;
  plan.arguments.sides = problem.sides;
  plan.arguments.gated = gated;
  plan.arguments.exchange_offset = static_cast<int>(RoundUp(launch.shared_bytes, int64_t{16}));
  plan.arguments.schedule_offset =
      plan.arguments.exchange_offset + (gated ? kGatedExchangeBytes : 0);
  plan.shared_bytes = plan.arguments.schedule_offset + static_cast<int>(schedule);
  return plan;
}

namespace {

/// Rows per expert from which on the MMA kernel takes over: the numbers of Hopper, or where the
/// GEMV kernel would read weights more than once.
int64_t LeastRowsOfMma(const ExpertTilesProblem& problem, const DeviceShape& device) {
  const auto gemv = PlanExpertGemv(problem, device);
  const int64_t most = gemv ? gemv->arguments.tile_rows : 0;
  return std::min(LeastRowsOfWgmma(problem), most + 1);
}

/// A tiling of the MMA kernel.
struct MmaTiling {
  int tile_rows = 0;  ///< 0: none fits.
  MmaFit fit;
  double cycles = 0;  ///< The estimate, for comparisons.
};

/// As FitMma, of CTAs with `own` bytes in addition to the pipeline.
MmaFit FitMmaWith(int64_t own, int tile_bytes, int tile_rows, int warps,
                  const DeviceShape& device) {
  constexpr int kMostResident = 4;
  constexpr int kEnough = 3;  ///< Stages that are worth more than another CTA.
  for (int resident = kMostResident; resident > 0; --resident) {
    DeviceShape rest = device;
    rest.shared_bytes -= static_cast<int>(std::min<int64_t>(resident * own, device.shared_bytes));
    const MmaFit fit = FitMma(rest, tile_bytes, tile_rows, warps, resident);
    if (fit.stages >= kEnough || (resident == 1 && fit.stages > 0)) return fit;
  }
  return {};
}

/// Every multiprocessor takes as many output tiles as the one with the most.
double CyclesOfTiles(const ExpertTilesProblem& problem, const DeviceShape& device, int sides,
                     const MmaTiling& tiling) {
  TileProblem tiles;
  tiles.tile_bytes = problem.weights.tile_bytes;
  const int64_t outputs = sides * (problem.matrix_weights / std::max(problem.weights.k, 1));
  const int64_t items = problem.experts * Ceil(problem.rows_per_expert, tiling.tile_rows) *
                        Ceil(outputs, int64_t{tiling.fit.warps} * kStripOutputs);
  return Ceil(items, device.multiprocessors) *
         MmaStepCycles(tiles, device, tiling.fit, tiling.tile_rows);
}

MmaTiling TilingOf(const ExpertTilesProblem& problem, int sides, int64_t own,
                   const DeviceShape& device) {
  MmaTiling best;
  const int most = MostMmaRows(problem.use);
  for (int rows = kLeastMmaRows; rows <= most; rows *= 2) {
    // Most experts, whose numbers of rows differ, have one tile.
    if (rows > kLeastMmaRows && rows / 2 >= 2 * problem.rows_per_expert) break;
    for (const int warps : {4, kMostMmaWarps}) {
      MmaTiling tiling = {rows, FitMmaWith(own, problem.weights.tile_bytes, rows, warps, device)};
      if (tiling.fit.stages == 0) continue;
      tiling.cycles = CyclesOfTiles(problem, device, sides, tiling);
      if (best.tile_rows == 0 || tiling.cycles < best.cycles) best = tiling;
    }
  }
  return best;
}

}  // namespace

std::optional<ExpertMmaPlan> PlanExpertMma(const ExpertTilesProblem& problem, bool gated,
                                           const DeviceShape& device) {
  if (device.has_wgmma || problem.weights.tiles_of_strip == 0 ||
      problem.rows_per_expert < LeastRowsOfMma(problem, device)) {
    return std::nullopt;
  }
  const auto schedule = RoundUp(TileScheduleBytes(problem.experts, problem.sides), int64_t{16});
  const auto own = RoundUp(schedule + kMmaExpertTileBytes, int64_t{128});
  const MmaTiling tiling = TilingOf(problem, gated ? 2 : 1, own, device);
  if (tiling.tile_rows == 0) return std::nullopt;
  ExpertMmaPlan plan;
  ExpertMmaArguments& args = plan.arguments;
  const MmaStages stages = {tiling.fit.stages, tiling.fit.warps, problem.weights.tile_bytes};
  const int pipeline = std::max(stages.Bytes(tiling.tile_rows), MmaExchangeBytes(stages.warps));
  const int few_bytes = MmaStages{1, stages.warps, stages.tile_bytes}.Bytes(tiling.tile_rows / 2);
  args.weights = problem.weights;
  args.sides = problem.sides;
  args.gated = gated;
  args.tile_rows = tiling.tile_rows;
  args.warps = tiling.fit.warps;
  args.stages = tiling.fit.stages;
  args.stages_of_few = std::min(pipeline / few_bytes, kMostMmaStages);
  args.schedule_offset = static_cast<int>(RoundUp(pipeline, int64_t{16}));
  args.tile_offset = args.schedule_offset + static_cast<int>(schedule);
  plan.resident = tiling.fit.resident;
  plan.shared_bytes = args.tile_offset + kMmaExpertTileBytes;
  return plan;
}

int SortPartsFor(int64_t selections) {
  // What the warps of one CTA read at once.
  constexpr int64_t kOfOnePart = 4096;
  constexpr int64_t kOfPart = 1024;
  if (selections <= kOfOnePart) return 1;
  return static_cast<int>(std::min<int64_t>(CeilDivide(selections, kOfPart), kMaxSortParts));
}

int SortWarpsFor(int64_t selections, int64_t experts, const DeviceShape& device) {
  const int64_t of_part = CeilDivide(selections, SortPartsFor(selections));
  const int64_t wanted = std::clamp<int64_t>(CeilDivide(of_part, 32), 1, kMaxSortWarps);
  const int64_t bytes = device.shared_bytes - SortBytes(0, 0);
  return static_cast<int>(std::min(wanted, bytes / (experts * int64_t{sizeof(int32_t)})));
}

}  // namespace marlin::cuda
