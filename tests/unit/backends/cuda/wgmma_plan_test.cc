// Plans of the WGMMA kernel, as gemv_plan_test.cc for the GEMV kernel.
#include "backends/cuda/gemm/wgmma/wgmma_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <vector>

#include "backends/cuda/gemm/gemv/gemv_plan.h"
#include "backends/cuda/plan/kernel_table.h"
#include "base/checked.h"
#include "plan_cases.h"

namespace marlin::cuda::wgmma_plan_test {
namespace {

/// The CTAs of a gated GEMM read every n-tile once, with the numbering of StripOf in
/// wgmma_block.cuh.
void ExpectGatedStripsCovered(const WgmmaArguments& args, int n) {
  ASSERT_EQ(args.half_strips * kStripOutputs * 2, n);
  std::vector<bool> seen(static_cast<size_t>(args.half_strips) * 2, false);
  for (int block = 0; block < args.blocks; ++block) {
    for (int i = 0; i < kStripsOfBlock; ++i) {
      const int gate = block * 2 + i / 2;
      ASSERT_LT(gate, args.half_strips);
      seen[static_cast<size_t>(i % 2 == 0 ? gate : gate + args.half_strips)] = true;
    }
  }
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](bool one) { return one; }));
}

/// Every CTA has k-iterations, and all CTAs that split an output tile run in one wave, one tile
/// each; in a cluster each also finishes a part of the sums.
void CheckSplits(const WgmmaPlan& plan, const DeviceShape& device) {
  const WgmmaArguments& args = plan.arguments;
  ASSERT_GE(args.splits, 1);
  ASSERT_LE(args.splits, kMaxSplits);
  int next = 0;
  for (int split = 0; split < args.splits; ++split) {
    const WgmmaItem item = ItemAt(args, 0, split);
    EXPECT_EQ(item.first_tile, next);
    EXPECT_GT(item.tiles, 0) << "a CTA without k-iterations";
    next += item.tiles;
  }
  EXPECT_EQ(next, args.tiles);
  if (args.splits == 1) return;
  EXPECT_EQ(plan.groups, args.items);
  EXPECT_EQ(args.in_cluster, plan.tokens <= kMaxClusterTokens && args.splits <= plan.tokens / 8 &&
                                 args.items <= device.clusters[args.splits - 1]);
  if (!args.in_cluster) {
    EXPECT_LE(args.items * args.splits, device.multiprocessors);
    return;
  }
  // The assignment of OwnerOf in wgmma_reduction.cuh.
  const int units = UnitsOfItem(plan.tokens);
  std::vector<int> owned(static_cast<size_t>(args.splits), 0);
  for (int unit = 0; unit < units; ++unit) {
    ++owned[static_cast<size_t>(unit) * static_cast<size_t>(args.splits) /
            static_cast<size_t>(units)];
  }
  for (const int of_block : owned) {
    EXPECT_GT(of_block, 0) << "a CTA without sums";
    EXPECT_LE(of_block * kUnitBytes, SenderBytes(plan.tokens, args.splits));
  }
}

/// The shared memory and the grid of one launch.
void CheckWgmmaLaunch(const WgmmaLaunch& launch, const TileProblem& problem,
                      const DeviceShape& device) {
  const WgmmaArguments& args = launch.arguments;
  EXPECT_NE(std::find(std::begin(kWgmmaWidths), std::end(kWgmmaWidths), launch.tokens),
            std::end(kWgmmaWidths));
  EXPECT_EQ(args.m, problem.m);
  EXPECT_EQ(args.tiles, CeilDivide(problem.k, kTileK));
  const int64_t at_once = device.multiprocessors / args.splits;
  EXPECT_EQ(launch.groups, args.streamed > 0 ? at_once : std::min<int64_t>(args.items, at_once));
  EXPECT_GE(launch.groups, 1);
  const int slots_of_step = SlotsOfStep(problem.tile_bytes / TileCodeBytes(1), launch.tokens);
  EXPECT_GE(args.slots, 2 * slots_of_step) << "no copy would overlap an MMA";
  EXPECT_GE(args.weight_slots * slots_of_step, args.slots) << "weights would be overwritten";
  const int64_t activations =
      int64_t{args.slots} * (StepActivationBytes(launch.tokens) / slots_of_step);
  const int64_t weights = int64_t{args.weight_slots} * kStripsOfBlock * problem.tile_bytes;
  Regions regions;
  regions.Add("activations", 0, activations, 1024);
  EXPECT_EQ(StepActivationBytes(launch.tokens) / 2 % 1024, 0) << "the swizzle's period";
  regions.Add("weights", args.weights_offset, weights, 16);
  regions.Add("exchange", args.exchange_offset, kExchangeBytes, 16);
  if (args.in_cluster) {
    regions.Add("reduction_buffer", args.reduction_offset,
                ReductionBufferBytes(launch.tokens, args.splits), 16);
  }
  regions.Add("barriers", args.barriers_offset, int64_t{args.slots} * 16 + 8, 8);
  EXPECT_LE(regions.end, launch.shared_bytes);
  EXPECT_LE(launch.shared_bytes, device.shared_bytes);
}

/// Every token and block of outputs is in one output tile of a plan's launches.
void ExpectItemsCover(const WgmmaPlan& plan) {
  constexpr int kFewestTokens = kWgmmaWidths[0];
  const WgmmaArguments& args = plan.arguments;
  const auto parts = static_cast<size_t>(CeilDivide(args.m, kFewestTokens));
  const auto blocks = static_cast<size_t>(args.blocks);
  if (parts * blocks > 20000) return;
  std::vector<int> covered(parts * blocks, 0);
  const auto cover = [&](const WgmmaLaunch& launch) {
    for (int i = 0; i < launch.arguments.items + launch.arguments.streamed; ++i) {
      const WgmmaItem item = ItemAt(launch.arguments, i, 0);
      ASSERT_LT(item.block, args.blocks);
      const int parts_of_tile = launch.tokens / kFewestTokens;
      for (int part = 0; part < parts_of_tile; ++part) {
        const auto row = static_cast<size_t>(item.token_tile * parts_of_tile + part);
        // Rows beyond m are not stored.
        if (row < parts) ++covered[row * blocks + static_cast<size_t>(item.block)];
      }
    }
  };
  cover(plan);
  if (plan.tail) cover(*plan.tail);
  EXPECT_TRUE(std::all_of(covered.begin(), covered.end(), [](int c) { return c == 1; }));
}

/// Every k-iteration of a stream-K tile belongs to one CTA, as TileScheduler in wgmma_block.cuh
/// assigns them, and their partial sums do not overlap in the workspace, as StreamReduction places
/// them.
void CheckStream(const WgmmaPlan& plan, const TileProblem& problem) {
  const WgmmaArguments& args = plan.arguments;
  EXPECT_FALSE(problem.batch_invariant);
  EXPECT_FALSE(plan.partials);
  EXPECT_FALSE(plan.tail);
  EXPECT_EQ(args.items % plan.groups, 0) << "whole waves";
  const int64_t part_bytes = int64_t{plan.tokens} * kBlockOutputs * 4;
  const int64_t places = (SumBytes(problem, plan) - StreamCounterBytes(plan)) / part_bytes;
  EXPECT_GE(StreamCounterBytes(plan), int64_t{args.streamed} * kCountersPerTile * 4);
  std::vector<bool> taken(static_cast<size_t>(places), false);
  int next = 0;
  for (int block = 0; block < plan.groups; ++block) {
    const int end = FirstStepOf(args, block + 1);
    ASSERT_EQ(FirstStepOf(args, block), next);
    ASSERT_GE(end, next);
    ASSERT_LE(end - next, args.run);
    for (int step = next; step < end;) {
      const int streamed = DivideStep(step, args.tiles_inverse);
      ASSERT_EQ(streamed, step / args.tiles);
      WgmmaItem item = ItemAt(args, args.items + streamed, 0);
      TakePart(args, streamed, next, end, &item);
      ASSERT_EQ(streamed * args.tiles + item.first_tile, step);
      ASSERT_GT(item.tiles, 0);
      ASSERT_LE(item.first_tile + item.tiles, args.tiles);
      step += item.tiles;
      if (item.tiles == args.tiles) continue;
      const int first_block = DivideStep(streamed * args.tiles, args.run_inverse);
      ASSERT_EQ(DivideStep(step - 1, args.run_inverse), block);
      const int place = block == first_block ? plan.groups + streamed : block;
      ASSERT_LT(place, places);
      ASSERT_FALSE(taken[static_cast<size_t>(place)]);
      taken[static_cast<size_t>(place)] = true;
    }
    next = end;
  }
  EXPECT_EQ(next, args.streamed * args.tiles);
}

void CheckWgmmaPlan(const WgmmaPlan& plan, const TileProblem& problem, const DeviceShape& device) {
  const WgmmaArguments& args = plan.arguments;
  CheckWgmmaLaunch(plan, problem, device);
  CheckSplits(plan, device);
  if (problem.batch_invariant) {
    EXPECT_EQ(args.splits, 1);
  }
  EXPECT_EQ(args.token_tiles, CeilDivide(problem.m, plan.tokens));
  if (args.half_strips != 0) {
    EXPECT_TRUE(problem.gated);
    ExpectGatedStripsCovered(args, problem.n);
  } else {
    EXPECT_EQ(args.blocks, CeilDivide(problem.n, kBlockOutputs));
  }
  const bool gates_apart = problem.gated && args.half_strips == 0;
  EXPECT_EQ(plan.partials, gates_apart || (args.splits > 1 && !args.in_cluster));
  int64_t items = int64_t{args.items} + args.streamed;
  if (args.streamed > 0) CheckStream(plan, problem);
  if (plan.tail) {
    EXPECT_EQ(args.splits, 1);
    EXPECT_EQ(args.items % device.multiprocessors, 0) << "whole waves";
    CheckWgmmaLaunch(*plan.tail, problem, device);
    EXPECT_LE(plan.tail->arguments.items, device.multiprocessors) << "one wave";
    items += plan.tail->arguments.items >> plan.tail->arguments.pieces_log2;
  }
  EXPECT_EQ(items, int64_t{args.token_tiles} * args.blocks);
  ExpectItemsCover(plan);
}

void CheckWgmma(const TileProblem& problem, const DeviceShape& device) {
  CheckWgmmaPlan(PlanWgmma(problem, device), problem, device);
}

/// All tile widths, and all split-K factors that the problem and the device support.
void CheckEveryWgmmaShape(const TileProblem& problem, const DeviceShape& device) {
  const int64_t tiles = CeilDivide(problem.k, kTileK);
  for (const int tokens : kWgmmaWidths) {
    const WgmmaPlan whole = PlanWgmmaAs(problem, device, {tokens, 1});
    EXPECT_EQ(whole.tokens, tokens);
    CheckWgmmaPlan(whole, problem, device);
    for (int splits = 2; splits <= kMaxSplits; ++splits) {
      if (!CanPlanWgmmaAs(problem, device, {tokens, splits})) continue;
      EXPECT_FALSE(problem.batch_invariant);
      EXPECT_LE(splits, tiles);
      const WgmmaPlan divided = PlanWgmmaAs(problem, device, {tokens, splits});
      EXPECT_EQ(divided.arguments.splits, splits);
      CheckWgmmaPlan(divided, problem, device);
    }
  }
}

TEST(PlanWgmma, CoversEveryShapeOnce) {
  for (const DeviceShape& device : Devices()) {
    for (const TileProblem& problem : ManyProblems(300, 5000)) {
      SCOPED_TRACE(Describe(problem, device));
      CheckWgmma(problem, device);
      if (HasFailure()) return;
    }
  }
}

TEST(PlanWgmma, CoversWithEveryWidthAndCluster) {
  for (const DeviceShape& device : Devices()) {
    for (TileProblem problem : ManyProblems(300, 2000)) {
      problem.n = 1 + problem.n % 4096;  // Few output tiles, so that clusters suffice.
      problem.gated = problem.gated && problem.n % 2 == 0;
      SCOPED_TRACE(Describe(problem, device));
      CheckEveryWgmmaShape(problem, device);
      if (HasFailure()) return;
    }
  }
}

/// Problems with one dimension as large as a device's memory allows.
TEST(PlanWgmma, CountsLargeShapes) {
  const DeviceShape device;
  constexpr int kLarge = 2147483000;
  for (const auto& [m, n, k] : {std::array<int, 3>{1 << 24, 16384, 4096},
                                {1 << 30, 128, 128},
                                {1, kLarge - kLarge % 128, 128},
                                {300, 1 << 28, 64},
                                {1, 128, kLarge},
                                {1 << 20, 200000, 200000},
                                {200000, 200000, 4096}}) {
    for (const bool gated : {false, true}) {
      const TileProblem problem = {
          .m = m, .n = n, .k = k, .tile_bytes = TileCodeBytes(8) + kGroupBytes, .gated = gated};
      SCOPED_TRACE(Describe(problem, device));
      CheckWgmma(problem, device);
      EXPECT_EQ(PartialBytes(problem, 3), int64_t{4} * m * n * 3);
    }
  }
}

/// Three full waves leave 52 of 448 tiles of 256 tokens: a fourth would take as long as each.
TEST(PlanWgmma, LeavesFewItemsToNarrowTiles) {
  const DeviceShape device;
  TileProblem problem = {
      .m = 1024, .n = 14336, .k = 4096, .tile_bytes = TileCodeBytes(4) + kGroupBytes};
  const WgmmaPlan plan = PlanWgmma(problem, device);
  EXPECT_EQ(plan.tokens, 256);
  EXPECT_EQ(plan.arguments.items, 396);
  ASSERT_TRUE(plan.tail);
  EXPECT_EQ(plan.tail->tokens, 128);
  EXPECT_EQ(plan.tail->arguments.items, 104);
  // 16 of 544 are left: as 128 tiles of 32 tokens they finish soonest.
  problem.m = 4352;
  problem.n = 4096;
  const WgmmaPlan quarters = PlanWgmmaAs(problem, device, {256, 1});
  ASSERT_TRUE(quarters.tail);
  EXPECT_EQ(quarters.tail->tokens, 32);
  // The last wave has 124 of 132 tiles: almost full.
  problem.m = 2048;
  EXPECT_FALSE(PlanWgmmaAs(problem, device, {256, 1}).tail);
  // A wave of few k-iterations ends before a second launch would begin.
  problem.m = 4352;
  problem.k = 128;
  EXPECT_FALSE(PlanWgmmaAs(problem, device, {256, 1}).tail);
}

TEST(PlanWgmma, MakesClustersOfFewItems) {
  const DeviceShape device;
  const TileProblem few = {
      .m = 16, .n = 1024, .k = 16384, .tile_bytes = TileCodeBytes(4) + kGroupBytes};
  EXPECT_GT(PlanWgmma(few, device).arguments.splits, 1);
  DeviceShape without = device;
  for (int blocks = 2; blocks <= kMaxSplits; ++blocks) without.clusters[blocks - 1] = 0;
  const WgmmaPlan plan = PlanWgmma(few, without);
  EXPECT_GT(plan.arguments.splits, 1);
  EXPECT_FALSE(plan.arguments.in_cluster);
}

/// More output tiles than clusters that run in one wave: the next smaller cluster would leave a
/// quarter of the SMs idle.
TEST(PlanWgmma, MeetsInMemoryWhereClustersAreTooFew) {
  const DeviceShape device;
  const TileProblem problem = {
      .m = 32, .n = 4096, .k = 14336, .tile_bytes = TileCodeBytes(4) + kGroupBytes};
  const WgmmaPlan plan = PlanWgmmaAs(problem, device, {32, 4});
  EXPECT_FALSE(plan.arguments.in_cluster);
  EXPECT_TRUE(plan.partials);
}

/// Measured on an H200: 8 to 24 % less time with stream-K, except the last four.
TEST(PlanWgmma, StreamsWhatWholeWavesLeave) {
  const DeviceShape device;
  struct Expected {
    int m, n, k, items, streamed;
  };
  for (const Expected& e : {Expected{32, 28672, 8192, 132, 92}, Expected{128, 28672, 8192, 132, 92},
                            Expected{32, 18944, 3584, 132, 16}, Expected{64, 10240, 8192, 0, 80},
                            Expected{256, 5120, 13824, 0, 80}, Expected{512, 13824, 5120, 132, 84},
                            Expected{32, 14336, 4096, 112, 0}, Expected{256, 14336, 4096, 112, 0},
                            Expected{32, 4096, 4096, 32, 0}, Expected{1024, 8192, 8192, 256, 0}}) {
    SCOPED_TRACE(::testing::Message() << e.m << " x " << e.n << " x " << e.k);
    const WgmmaPlan plan = PlanWgmma(Fp4Problem(e.m, e.n, e.k), device);
    EXPECT_EQ(plan.arguments.items, e.items);
    EXPECT_EQ(plan.arguments.streamed, e.streamed);
  }
  TileProblem invariant = Fp4Problem(32, 28672, 8192);
  invariant.batch_invariant = true;
  EXPECT_EQ(PlanWgmma(invariant, device).arguments.streamed, 0);
  // DivideStep is not exact for as many k-iterations.
  EXPECT_EQ(PlanWgmma(Fp4Problem(1, 128, 2147483000), device).arguments.streamed, 0);
}

/// Batch invariance: the order of a row's sums must not depend on m.
TEST(PlanWgmma, KeepsOneSplitWhereBatchesMayNotMatter) {
  const DeviceShape device;
  for (int m = 1; m <= 300; ++m) {
    const TileProblem problem = {.m = m,
                                 .n = 1024,
                                 .k = 100000,
                                 .tile_bytes = TileCodeBytes(4) + kGroupBytes,
                                 .gated = m % 2 == 0,
                                 .batch_invariant = true};
    EXPECT_EQ(PlanWgmma(problem, device).arguments.splits, 1) << m;
  }
}

/// FP4 with groups of 128 and bf16 activations.
GemmDesc Fp4Gemm(int64_t m, int64_t n, int64_t k) {
  GemmDesc desc;
  desc.m = m;
  desc.n = n;
  desc.k = k;
  desc.group_size = 128;
  desc.a_type = desc.c_type = DType::kBf16;
  desc.weights.tiled = desc.weights.fits_f16 = true;
  return desc;
}

double MicrosecondsOf(std::string_view kernel, const GemmDesc& desc) {
  for (const KernelDesc& row : CudaKernels()) {
    if (row.name == kernel) return FamilyOf(row).microseconds(desc, DeviceShape());
  }
  ADD_FAILURE() << "no row " << kernel;
  return 0;
}

/// Whether the WGMMA kernel is expected to be faster than the GEMV kernel.
bool WgmmaIsFaster(const GemmDesc& desc) {
  return MicrosecondsOf("marlin_gemm_wgmma", desc) < MicrosecondsOf("marlin_gemv_mma", desc);
}

TEST(Estimates, PreferWgmmaFromNineRowsOnWhereStripsDoNotFillTheDevice) {
  // 288 n-tiles on 132 CTAs: 24 have three, the others two.
  EXPECT_TRUE(WgmmaIsFaster(Fp4Gemm(16, 9216, 4096)));
  EXPECT_TRUE(WgmmaIsFaster(Fp4Gemm(9, 9216, 4096)));
  // The estimates are fitted to each other from nine rows on only; below, they would mislead here.
  EXPECT_FALSE(WgmmaIsFaster(Fp4Gemm(8, 8704, 4096)));
  EXPECT_FALSE(WgmmaIsFaster(Fp4Gemm(16, 28672, 8192)));
  // Split-K would go through the workspace.
  EXPECT_FALSE(WgmmaIsFaster(Fp4Gemm(16, 2048, 5120)));
}

TEST(Estimates, PreferGemvWhereTheyWereNotFitted) {
  for (int64_t m = 1; m <= kMaxGemvRows; ++m) {
    for (const int64_t n : {1, 32, 4096, 9216, 151936}) {
      for (const int64_t k : {1, 128, 4096, 65536}) {
        GemmDesc desc = Fp4Gemm(m, n, k);
        EXPECT_FALSE(m <= 8 && WgmmaIsFaster(desc)) << m << " " << n << " " << k;
        desc.gated = true;
        EXPECT_FALSE(WgmmaIsFaster(desc)) << m << " " << n << " " << k;
        desc.gated = false;
        desc.format = Format::kNf4;
        EXPECT_FALSE(WgmmaIsFaster(desc)) << m << " " << n << " " << k;
        desc.format = Format::kFp8E4M3;
        EXPECT_FALSE(WgmmaIsFaster(desc)) << m << " " << n << " " << k;
        desc.format = Format::kFp4E2M1;
        desc.group_size = 32;  // Several groups per tile, unless one holds all of k.
        EXPECT_FALSE(k > 32 && WgmmaIsFaster(desc)) << m << " " << n << " " << k;
      }
    }
  }
}

TEST(Estimates, NeverPreferTheExactKernel) {
  for (const int64_t m : {1, 8, 9, 16, 17, 300, 65536}) {
    for (const int64_t n : {1, 4096, 2000000}) {
      for (const int64_t k : {1, 4096, 65536}) {
        const GemmDesc desc = Fp4Gemm(m, n, k);
        EXPECT_LT(MicrosecondsOf("marlin_gemm_wgmma", desc),
                  MicrosecondsOf("marlin_gemm_cuda_exact", desc));
      }
    }
  }
}

}  // namespace
}  // namespace marlin::cuda::wgmma_plan_test
