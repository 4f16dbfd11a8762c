// Plans of the GEMV kernel, also for shapes too large to run: each covers its problem once, fits
// shared memory, and overflows no integer.
#include "backends/cuda/gemm/gemv/gemv_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/checked.h"
#include "plan_cases.h"

namespace marlin::cuda::gemv_plan_test {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kNamedBarriers = 16;

/// Every (n-tile, tile) of a CTA belongs to one warp, with the kernel's numbering of warps.
void ExpectWarpsCover(const GemvArguments& args, int warps, int strips, int tiles) {
  const int lanes = 1 << args.lanes_log2;
  ASSERT_EQ(args.share, 1 << args.share_log2);
  ASSERT_EQ(args.share * lanes, warps);
  EXPECT_LE(lanes, std::max(strips, 1)) << "a warp without a strip";
  if (args.share > 1) {
    EXPECT_LT(lanes, kNamedBarriers) << "barrier 0 is __syncthreads";
  }
  if (int64_t{strips} * tiles > 20000) return;  // Small problems show all cases.
  std::vector<int> covered(static_cast<size_t>(strips) * static_cast<size_t>(tiles), 0);
  for (int warp = 0; warp < warps; ++warp) {
    const int sharer = warp & (args.share - 1);
    for (int strip = warp >> args.share_log2; strip < strips; strip += lanes) {
      const int mine = tiles > sharer ? (tiles - sharer + args.share - 1) >> args.share_log2 : 0;
      for (int i = 0; i < mine; ++i) {
        const int tile = i * args.share + sharer;
        ASSERT_LT(tile, tiles);
        ++covered[static_cast<size_t>(strip) * static_cast<size_t>(tiles) +
                  static_cast<size_t>(tile)];
      }
    }
  }
  EXPECT_TRUE(std::all_of(covered.begin(), covered.end(), [](int c) { return c == 1; }));
}

/// Every (row, piece) of the activations is copied by one warp of the multicast group, with the
/// kernel's numbering of copies.
void ExpectRowsCopiedOnce(const GemvArguments& args, int warps) {
  EXPECT_LE(args.row_mask, args.m - 1);
  EXPECT_EQ(args.row_mask & (args.row_mask + 1), 0) << "not a mask";
  std::vector<int> copied(static_cast<size_t>(args.pieces) * static_cast<size_t>(args.m), 0);
  for (int first = 0; first < warps * args.multicast; ++first) {
    int piece = first * args.piece_factor >> 16;
    int row = first - piece * args.m;
    while (piece < args.pieces) {
      ASSERT_GE(row, 0);
      ASSERT_LT(row, args.m);
      ++copied[static_cast<size_t>(piece) * static_cast<size_t>(args.m) + static_cast<size_t>(row)];
      piece += args.step_pieces;
      row += args.step_rows;
      if (row >= args.m) {
        row -= args.m;
        ++piece;
      }
    }
  }
  EXPECT_TRUE(std::all_of(copied.begin(), copied.end(), [](int c) { return c == 1; }));
}

void CheckGemvPlan(const GemvPlan& plan, const TileProblem& problem, const DeviceShape& device) {
  const GemvArguments& args = plan.arguments;
  EXPECT_EQ(args.m, problem.m);
  EXPECT_EQ(args.k, problem.k);
  EXPECT_EQ(args.tiles, CeilDivide(problem.k, kTileK));
  ExpectSplitsCover(args.tiles, args.tiles_of_split, plan.splits);
  EXPECT_EQ(args.splits, plan.splits);
  const bool meet = plan.splits > 1 && plan.splits <= kMaxSplits && !problem.gated;
  EXPECT_EQ(args.in_cluster, meet && !plan.in_memory);
  EXPECT_TRUE(meet || !plan.in_memory);
  EXPECT_EQ(plan.partials, problem.gated || (plan.splits > 1 && !args.in_cluster));
  EXPECT_LE(plan.warps * 32, kMaxThreads);

  // CTAs along n: the first units_rest of them have one unit more; the second of a multicast pair
  // may have none.
  const int64_t units = CeilDivide(problem.n, kStripOutputs * plan.strips);
  EXPECT_TRUE(args.units_base >= 1 || (args.multicast == 2 && args.units_rest == plan.groups - 1));
  EXPECT_LT(args.units_rest, plan.groups);
  EXPECT_EQ(int64_t{args.units_base} * plan.groups + args.units_rest, units);
  EXPECT_EQ(UnitsOf(plan), units);
  const int cluster = (args.in_cluster ? args.splits : 1) * args.multicast;
  ASSERT_LE(cluster, kMaxSplits);
  EXPECT_EQ(plan.groups % args.multicast, 0);
  EXPECT_LE(plan.groups / args.multicast,
            std::max(1, args.in_cluster || args.splits == 1
                            ? (cluster == 1 ? device.multiprocessors : device.clusters[cluster - 1])
                            : device.multiprocessors / plan.splits / args.multicast))
      << "a second wave";
  ExpectWarpsCover(args, plan.warps, args.units_base + (args.units_rest > 0 ? 1 : 0),
                   args.tiles_of_split);

  // Pieces of the activations.
  EXPECT_LE(args.pieces, kMaxPieces);
  EXPECT_LE(args.pieces, plan.warps) << "each warp initializes at most one barrier";
  ExpectSplitsCover(args.tiles_of_split, 1 << args.piece_log2, args.pieces);
  EXPECT_TRUE(args.multicast == 1 || args.bulk);
  EXPECT_EQ(args.bulk, device.has_tma() && problem.k % 8 == 0);

  ExpectRowsCopiedOnce(args, plan.warps);

  EXPECT_GE(args.stages, 1);
  EXPECT_LE(args.stages, device.has_tma() ? kMaxBulkStages : kMaxStages);
  EXPECT_GE(args.first_stages, 1);
  EXPECT_LE(args.first_stages, device.has_tma() ? args.stages : 1);
  EXPECT_TRUE(device.has_tma() || !args.in_cluster);
  EXPECT_TRUE(device.has_multicast() || args.multicast == 1);
  EXPECT_GE(args.row_bytes, int64_t{args.tiles_of_split} * kTileK * 2);
  EXPECT_EQ(args.row_bytes % 16, 0);
  Regions regions;
  regions.Add("rings", 0, int64_t{plan.warps} * args.stages * plan.strips * problem.tile_bytes,
              128);
  regions.Add("activations", args.activations_offset, int64_t{args.row_bytes} * problem.m, 16);
  regions.Add("sums", args.sums_offset, int64_t{plan.warps} * kSumFloats * 4, 16);
  EXPECT_LE(args.share, kMaxSharers);
  const int64_t strips = int64_t{args.units_base + (args.units_rest > 0 ? 1 : 0)} * plan.strips;
  const int64_t parts = args.in_cluster ? RoundUp(strips, int64_t{args.splits}) : 0;
  regions.Add("reduction_buffer", args.reduction_offset,
              args.in_cluster ? kReductionBarrierBytes + parts * problem.m * kStripOutputs * 4 : 0,
              16);
  regions.Add("table", args.table_offset, problem.pair_table ? kPairTableBytes : 0, 4);
  regions.Add("barriers", args.barriers_offset,
              (kMaxPieces + int64_t{plan.warps} * args.stages) * 8, 8);
  EXPECT_LE(regions.end, plan.shared_bytes);
  EXPECT_LE(plan.shared_bytes, device.shared_bytes);
}

void CheckGemv(const TileProblem& problem, const DeviceShape& device) {
  const GemvPlan plan = PlanGemv(problem, device);
  // Other problems have no kernel for units of two n-tiles.
  EXPECT_TRUE(plan.strips == 1 || (problem.narrow_codes && problem.m <= kOctet));
  CheckGemvPlan(plan, problem, device);
}

/// Checks every plan of this split-K factor and multicast group that fits shared memory.
void CheckEveryGemvShape(const TileProblem& problem, const DeviceShape& device, int splits,
                         int multicast) {
  const int stages = 1 + splits % 3;
  const int first_stages = 1 + splits % stages;
  for (const int warps : {4, 8, 16}) {
    for (const bool in_memory : {false, true}) {
      for (const int strips : {1, 2}) {
        const GemvShape shape = {warps, stages, first_stages, splits, strips, multicast, in_memory};
        const auto plan = PlanGemvAs(problem, device, shape);
        if (plan) CheckGemvPlan(*plan, problem, device);
      }
    }
  }
}

void CheckEveryGemvShape(const TileProblem& problem, const DeviceShape& device) {
  for (const int splits : {1, 2, 3, 4, 7, 8, 9, 40}) {
    CheckEveryGemvShape(problem, device, splits, 1);
    if (problem.k % 8 == 0 && splits * 2 <= kMaxSplits) {
      CheckEveryGemvShape(problem, device, splits, 2);
    }
  }
}

TEST(PlanGemv, CoversEveryShapeOnce) {
  for (const DeviceShape& device : DevicesAndCards()) {
    for (const TileProblem& problem : ManyProblems(kMaxGemvRows, 5000)) {
      SCOPED_TRACE(Describe(problem, device));
      CheckGemv(problem, device);
      if (HasFailure()) return;
    }
  }
}

TEST(PlanGemv, CoversInEveryShapeOfBlocks) {
  for (const DeviceShape& device : DevicesAndCards()) {
    for (const TileProblem& problem : ManyProblems(kMaxGemvRows, 500)) {
      SCOPED_TRACE(Describe(problem, device));
      CheckEveryGemvShape(problem, device);
      if (HasFailure()) return;
    }
  }
}

TEST(PlanGemv, CoversEverySmallShapeOnce) {
  const DeviceShape device;
  for (const int m : {1, 2, 7, 8, 9, 16}) {
    for (int strips = 1; strips <= 300; ++strips) {
      for (int tiles = 1; tiles <= 40; ++tiles) {
        TileProblem problem;
        problem.m = m;
        problem.n = strips * kStripOutputs - strips % kStripOutputs;
        problem.k = tiles * kTileK - tiles % 3;
        problem.tile_bytes = TileCodeBytes(4) + kGroupBytes;
        problem.narrow_codes = strips % 2 == 0;
        SCOPED_TRACE(Describe(problem, device));
        CheckGemv(problem, device);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(PlanGemv, EndsForEveryLengthOfRows) {
  const DeviceShape device;
  const DeviceShape small = {.code = 80, .has_wgmma = false, .shared_bytes = 99 * 1024};
  for (const int k : {1 << 20, 1 << 22, (1 << 22) + 1, 100000000, 2147483000}) {
    for (const int m : {1, kMaxGemvRows}) {
      for (const int tile_bytes : AllTileBytes()) {
        const TileProblem problem = {.m = m, .n = 64, .k = k, .tile_bytes = tile_bytes};
        SCOPED_TRACE(Describe(problem, device));
        CheckGemv(problem, device);
        CheckGemv(problem, small);
        if (HasFailure()) return;
      }
    }
  }
}

/// Deep pipelines, as far as shared memory allows, and activations that are not divided.
TEST(PlanGemv, PipelinesDeeplyWithoutTma) {
  const DeviceShape large = {.code = 80, .has_wgmma = false, .shared_bytes = 163 * 1024};
  DeviceShape small = large;
  small.shared_bytes = 99 * 1024;
  const TileProblem problem = Fp4Problem(1, 14336, 8192);
  EXPECT_EQ(PlanGemv(problem, large).arguments.stages, 3);
  EXPECT_EQ(PlanGemv(problem, large).arguments.pieces, 1);
  EXPECT_GE(PlanGemv(problem, small).arguments.stages, 2);
  EXPECT_EQ(PlanGemv(Fp4Problem(16, 4096, 4096), large).arguments.pieces, kMaxPieces);
  EXPECT_TRUE(PlanGemv(Fp4Problem(1, 1024, 8192), small).in_memory);
}

/// The fastest plans measured on an H200.
TEST(PlanGemv, SharesCopiesWhereTheyAreMany) {
  const DeviceShape device;
  const GemvPlan few_strips = PlanGemv(Fp4Problem(16, 8192, 8192), device);
  EXPECT_EQ(few_strips.splits, 2);
  EXPECT_TRUE(few_strips.in_memory);
  EXPECT_EQ(few_strips.arguments.multicast, 2);
  EXPECT_EQ(few_strips.arguments.stages, 2);
  EXPECT_TRUE(PlanGemv(Fp4Problem(16, 28672, 8192), device).arguments.in_cluster);
  EXPECT_EQ(PlanGemv(Fp4Problem(8, 28672, 8192), device).strips, 2);
  EXPECT_EQ(PlanGemv(Fp4Problem(2, 4096, 4096), device).arguments.multicast, 1);
  EXPECT_EQ(PlanGemv(Fp4Problem(3, 4096, 4096), device).arguments.multicast, 2);
  EXPECT_EQ(PlanGemv(Fp4Problem(8, 768, 2048), device).arguments.multicast, 1);
}

/// The heuristic plans alone took 1.1 to 1.7 times as long for these on an H200, except the last.
TEST(PlanGemv, DividesKWhereStripsWouldLeaveBlocksIdle) {
  const DeviceShape device;
  struct Expected {
    int m, n, k, splits, strips;
  };
  for (const Expected& e : {Expected{8, 5120, 13824, 3, 1}, Expected{14, 5120, 13824, 3, 1},
                            Expected{14, 3584, 18944, 4, 1}, Expected{12, 28672, 8192, 2, 1},
                            Expected{8, 22016, 4096, 1, 1}, Expected{8, 10240, 8192, 3, 1},
                            Expected{9, 8192, 28672, 4, 1}, Expected{8, 8192, 8192, 1, 1}}) {
    SCOPED_TRACE(::testing::Message() << e.m << " x " << e.n << " x " << e.k);
    const GemvPlan plan = PlanGemv(Fp4Problem(e.m, e.n, e.k), device);
    EXPECT_EQ(plan.splits, e.splits);
    EXPECT_EQ(plan.strips, e.strips);
    EXPECT_EQ(plan.warps, 16);
  }
}

}  // namespace
}  // namespace marlin::cuda::gemv_plan_test
