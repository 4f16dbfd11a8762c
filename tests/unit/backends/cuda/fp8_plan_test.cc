// Invariants of the plans of the FP8 kernel.
#include "backends/cuda/gemm/fp8/fp8_plan.h"

#include <gtest/gtest.h>

#include "backends/cuda/plan/kernel_table.h"

namespace marlin::cuda {
// Defined in fp8_plan.cc, for the rows of kernels.def.
Support SupportsFp8(const GemmDesc& desc, const DeviceProperties& device);
Support SupportsFp8Mma(const GemmDesc& desc, const DeviceProperties& device);
}  // namespace marlin::cuda

namespace marlin::cuda::fp8_plan_test {
namespace {

constexpr int kFp4TileBytes = TileCodeBytes(4) + kGroupBytes;

TileProblem Problem(int m, int n, int k, int tile_bytes = kFp4TileBytes) {
  TileProblem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.tile_bytes = tile_bytes;
  return problem;
}

/// Regions of shared memory do not overlap, fit, and have the alignment of their copies and of the
/// swizzle.
void ExpectGood(const TileProblem& problem, const Fp8Launch& plan) {
  const WgmmaArguments& args = plan.arguments.product;
  EXPECT_GE(args.slots, 2);
  EXPECT_EQ(args.weight_slots, args.slots);
  EXPECT_EQ(args.weights_offset, args.slots * Fp8SlotBytes(plan.tokens));
  EXPECT_EQ(args.weights_offset % 1024, 0);
  EXPECT_EQ(args.exchange_offset,
            args.weights_offset + args.slots * kStripsOfBlock * problem.tile_bytes);
  EXPECT_EQ(args.exchange_offset % 16, 0);
  EXPECT_EQ(args.barriers_offset, args.exchange_offset + kExchangeBytes);
  EXPECT_EQ(args.barriers_offset % 8, 0);
  EXPECT_EQ(plan.shared_bytes, args.barriers_offset + args.slots * 16);
  EXPECT_LE(plan.shared_bytes, DeviceShape().shared_bytes);
  EXPECT_EQ(args.splits, 1);
  EXPECT_GE(args.token_tiles * (plan.tokens << args.pieces_log2), problem.m);
  EXPECT_GE(args.blocks * kBlockOutputs, problem.n);
  EXPECT_GE(args.tiles * kTileK, problem.k);
  EXPECT_LE(plan.groups, DeviceShape().multiprocessors);
}

void ExpectGood(const TileProblem& problem, const Fp8Plan& plan) {
  ExpectGood(problem, static_cast<const Fp8Launch&>(plan));
  const WgmmaArguments& args = plan.arguments.product;
  int items = args.items;
  if (plan.tail) {
    ExpectGood(problem, *plan.tail);
    const WgmmaArguments& rest = plan.tail->arguments.product;
    EXPECT_EQ(args.items % DeviceShape().multiprocessors, 0) << "whole waves";
    EXPECT_EQ(rest.first_item, args.items);
    EXPECT_EQ(plan.tail->tokens << rest.pieces_log2, plan.tokens);
    EXPECT_EQ(plan.tail->groups, rest.items) << "one wave";
    items += rest.items >> rest.pieces_log2;
  }
  EXPECT_EQ(items, args.token_tiles * args.blocks);
}

TEST(PlanFp8, FitsForEveryWidthAndTile) {
  for (const int tokens : {64, 128, 256}) {
    for (const int bits : {2, 3, 4}) {
      for (const int parameters : {1, 2, 4, 8}) {
        const TileProblem problem =
            Problem(300, 200, 272, TileCodeBytes(bits) + parameters * kGroupBytes);
        ExpectGood(problem, PlanFp8As(problem, DeviceShape(), tokens));
        ExpectGood(problem, PlanFp8(problem, DeviceShape()));
      }
    }
  }
}

TEST(PlanFp8, TakesWideTilesForManyRowsAndNarrowForFew) {
  EXPECT_EQ(PlanFp8(Problem(1, 8192, 8192), DeviceShape()).tokens, 64);
  EXPECT_EQ(PlanFp8(Problem(1024, 8192, 8192), DeviceShape()).tokens, 256);
  EXPECT_EQ(PlanFp8(Problem(4096, 14336, 4096), DeviceShape()).tokens, 256);
}

/// Three full waves leave 52 of 448 tiles of 256 tokens: a fourth would take as long as each.
TEST(PlanFp8, LeavesFewItemsToNarrowTiles) {
  const TileProblem problem = Problem(1024, 14336, 4096);
  const Fp8Plan plan = PlanFp8(problem, DeviceShape());
  ExpectGood(problem, plan);
  EXPECT_EQ(plan.tokens, 256);
  EXPECT_EQ(plan.arguments.product.items, 396);
  ASSERT_TRUE(plan.tail);
  EXPECT_EQ(plan.tail->tokens, 128);
  EXPECT_EQ(plan.tail->arguments.product.items, 104);
  EXPECT_FALSE(PlanFp8(Problem(1024, 8192, 8192), DeviceShape()).tail);
}

TEST(PlanFp8, PutsGatesThatLieApartIntoTheWorkspace) {
  TileProblem problem = Problem(64, 192, 128);
  problem.gated = true;
  EXPECT_TRUE(PlanFp8(problem, DeviceShape()).partials);
  problem.n = 256;
  EXPECT_FALSE(PlanFp8(problem, DeviceShape()).partials);
  EXPECT_EQ(PlanFp8(problem, DeviceShape()).arguments.product.half_strips, 4);
}

TEST(PlanFp8, RoundsRowsToWholeSteps) {
  EXPECT_EQ(QuantizedColumns(1), 128);
  EXPECT_EQ(QuantizedColumns(128), 128);
  EXPECT_EQ(QuantizedColumns(129), 256);
}

/// Code without wgmma multiplies the same problems, by mma.sync.
TEST(Fp8Kernels, QuantizeOnEveryDevice) {
  GemmDesc desc;
  desc.m = 3;
  desc.n = desc.k = 256;
  desc.aligned = true;
  desc.a_type = DType::kBf16;
  desc.accuracy = Accuracy::kW4A8;
  desc.weights.tiled = desc.weights.fits_fp8 = true;
  const DeviceProperties ampere = {.level = Isa::kCuda, .cuda_code = 80, .has_wgmma = false};
  EXPECT_FALSE(SupportsFp8(desc, ampere).ok());
  EXPECT_TRUE(SupportsFp8Mma(desc, ampere).ok());
  EXPECT_TRUE(NeedsStaging(desc));
  desc.weights.fits_fp8 = false;
  EXPECT_FALSE(SupportsFp8Mma(desc, ampere).ok());
  desc.weights.fits_fp8 = true;
  desc.accuracy = Accuracy::kDefault;
  EXPECT_FALSE(SupportsFp8Mma(desc, ampere).ok());
  EXPECT_FALSE(NeedsStaging(desc));
}

}  // namespace
}  // namespace marlin::cuda::fp8_plan_test
