// Plans of the MMA kernel, as gemv_plan_test.cc for the GEMV kernel.
#include "backends/cuda/gemm/mma/mma_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <vector>

#include "backends/cuda/plan/kernel_table.h"
#include "base/checked.h"
#include "plan_cases.h"

namespace marlin::cuda::mma_plan_test {
namespace {

/// Every n-tile belongs to a warp of one block, and its ups to a warp of the same block.
void ExpectStripsCovered(const MmaPlan& plan, int n) {
  const MmaArguments& args = plan.arguments;
  const auto strips = static_cast<size_t>(CeilDivide(n, kStripOutputs));
  std::vector<int> covered(strips, 0);
  for (int block = 0; block < args.blocks; ++block) {
    for (int warp = 0; warp < plan.warps; ++warp) {
      const auto strip = static_cast<size_t>(MmaStripOf(args.half_strips, plan.warps, block, warp));
      const bool is_gate = args.half_strips != 0 && warp < plan.warps / 2;
      // Gates after the last one are ups: their sums are not stored.
      if (is_gate && strip >= static_cast<size_t>(args.half_strips)) continue;
      if (strip < strips) ++covered[strip];
    }
  }
  EXPECT_TRUE(std::all_of(covered.begin(), covered.end(), [](int c) { return c == 1; }));
}

void ExpectItemsCover(const MmaPlan& plan) {
  const MmaArguments& args = plan.arguments;
  if (plan.items > 20000) return;  // Small problems show all cases.
  std::vector<int> covered(static_cast<size_t>(plan.items), 0);
  for (int i = 0; i < plan.items; ++i) {
    const MmaItem item = MmaItemAt(args, i, 0);
    ASSERT_GE(item.block, 0);
    ASSERT_LT(item.block, args.blocks);
    ASSERT_GE(item.token_tile, 0);
    ASSERT_LT(item.token_tile, args.token_tiles);
    ++covered[static_cast<size_t>(item.token_tile) * static_cast<size_t>(args.blocks) +
              static_cast<size_t>(item.block)];
  }
  EXPECT_TRUE(std::all_of(covered.begin(), covered.end(), [](int c) { return c == 1; }));
}

void CheckMmaPlan(const MmaPlan& plan, const TileProblem& problem, const DeviceShape& device) {
  const MmaArguments& args = plan.arguments;
  EXPECT_NE(std::find(std::begin(kMmaWidths), std::end(kMmaWidths), plan.tokens),
            std::end(kMmaWidths));
  EXPECT_TRUE(plan.warps == 4 || plan.warps == kMostMmaWarps);
  EXPECT_GE(args.stages, 2) << "no copy would overlap an MMA";
  EXPECT_LE(args.stages, kMostMmaStages);
  const MmaStages stages = {args.stages, plan.warps, problem.tile_bytes};
  EXPECT_LE(stages.Bytes(plan.tokens), plan.shared_bytes);
  EXPECT_LE(MmaExchangeBytes(plan.warps), plan.shared_bytes);
  EXPECT_EQ(stages.WeightsOffset(plan.tokens) % 256, 0);
  EXPECT_LE(plan.shared_bytes, device.shared_bytes);
  EXPECT_LE(int64_t{plan.resident} * (plan.shared_bytes + 1024), device.shared_bytes + 1024);
  EXPECT_EQ(args.m, problem.m);
  EXPECT_EQ(args.k, problem.k);
  EXPECT_EQ(args.token_tiles, CeilDivide(problem.m, plan.tokens));
  EXPECT_EQ(plan.items, int64_t{args.token_tiles} * args.blocks);
  EXPECT_EQ(plan.partials, problem.gated && args.half_strips == 0);
  if (args.half_strips != 0) {
    EXPECT_EQ(args.half_strips * kStripOutputs * 2, problem.n);
  }
  ASSERT_GE(args.splits, 1);
  ASSERT_LE(args.splits, kMaxSplits);
  if (problem.batch_invariant) {
    EXPECT_EQ(args.splits, 1);
  }
  int next = 0;
  for (int split = 0; split < args.splits; ++split) {
    const MmaItem item = MmaItemAt(args, 0, split);
    EXPECT_EQ(item.first_tile, next);
    EXPECT_GT(item.tiles, 0) << "a CTA without k-iterations";
    next += item.tiles;
  }
  EXPECT_EQ(next, CeilDivide(problem.k, kTileK));
  ExpectStripsCovered(plan, problem.n);
  ExpectItemsCover(plan);
}

void CheckEveryShape(const TileProblem& problem, const DeviceShape& device) {
  bool can_run = false;
  for (const int tokens : kMmaWidths) {
    for (int splits = 1; splits <= kMaxSplits; ++splits) {
      if (!CanPlanMmaAs(problem, device, {tokens, splits})) continue;
      can_run = true;
      const MmaPlan plan = PlanMmaAs(problem, device, {tokens, splits});
      EXPECT_EQ(plan.tokens, tokens);
      EXPECT_EQ(plan.arguments.splits, splits);
      CheckMmaPlan(plan, problem, device);
    }
  }
  EXPECT_TRUE(can_run);
}

TEST(PlanMma, CoversEveryShapeOnce) {
  for (const DeviceShape& device : DevicesAndCards()) {
    for (const TileProblem& problem : ManyProblems(300, 800)) {
      SCOPED_TRACE(Describe(problem, device));
      CheckMmaPlan(PlanMma(problem, device), problem, device);
      if (HasFailure()) return;
    }
  }
}

TEST(PlanMma, CoversWithEveryWidthAndSplit) {
  for (const DeviceShape& device : DevicesAndCards()) {
    for (TileProblem problem : ManyProblems(300, 150)) {
      problem.n = 1 + problem.n % 4096;  // Few output tiles, so that there are splits.
      problem.gated = problem.gated && problem.n % 2 == 0;
      SCOPED_TRACE(Describe(problem, device));
      CheckEveryShape(problem, device);
      if (HasFailure()) return;
    }
  }
}

/// Problems with one dimension as large as a device's memory allows.
TEST(PlanMma, CountsLargeShapes) {
  constexpr int kLarge = 2147483000;
  for (const auto& [name, device] : Cards()) {
    for (const auto& [m, n, k] : {std::array<int, 3>{1 << 24, 16384, 4096},
                                  {1 << 29, 128, 128},
                                  {1, kLarge - kLarge % 128, 128},
                                  {300, 1 << 28, 64},
                                  {1, 128, kLarge},
                                  {1 << 20, 200000, 200000}}) {
      const TileProblem problem = {
          .m = m, .n = n, .k = k, .tile_bytes = TileCodeBytes(8) + kGroupBytes};
      SCOPED_TRACE(Describe(problem, device));
      const MmaPlan plan = PlanMma(problem, device);
      EXPECT_GT(plan.items, 0);
      EXPECT_EQ(plan.items, int64_t{plan.arguments.token_tiles} * plan.arguments.blocks);
      EXPECT_GT(plan.cycles, 0);
    }
  }
}

TEST(PlanMma, FillsTheDevice) {
  for (const auto& [name, device] : Cards()) {
    SCOPED_TRACE(name);
    // Few output tiles: split-K makes more.
    const MmaPlan few = PlanMma(Fp4Problem(32, 2048, 8192), device);
    if (device.multiprocessors > 64) {
      EXPECT_GT(few.arguments.splits, 1);
    }
    EXPECT_LE(few.tokens, 32);
    const MmaPlan many = PlanMma(Fp4Problem(4096, 8192, 8192), device);
    EXPECT_GE(many.tokens, 64);
    EXPECT_EQ(many.arguments.splits, 1);
  }
}

}  // namespace
}  // namespace marlin::cuda::mma_plan_test
