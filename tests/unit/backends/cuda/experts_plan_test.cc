// Plans of the experts' launches: shared memory holds all parts, apart from each other, for every
// kind of codes and k that is planned at all, on every card.
#include "backends/cuda/moe/experts/experts_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "backends/cuda/gemm/gemv/gemv_layout.h"
#include "backends/cuda/layout/sparse_layout.h"
#include "cards.h"

namespace marlin::cuda::experts_plan_test {
namespace {

CodeKind KindOf(int bits) {
  for (const CodeKind kind :
       {CodeKind::kTable4, CodeKind::kTable2, CodeKind::kTable3, CodeKind::kInt8}) {
    if (CodeBits(kind) == bits) return kind;
  }
  return CodeKind::kDense16;
}

ExpertTilesProblem Problem(int64_t k, int bits = 4, int64_t rows = 1, int64_t experts = 128) {
  ExpertTilesProblem problem;
  problem.kind = KindOf(bits);
  problem.weights.k = static_cast<int>(k);
  problem.weights.tiles_of_strip = static_cast<int>((k + kTileK - 1) / kTileK);
  problem.weights.tile_bytes = TileCodeBytes(bits) + (bits == 16 ? 0 : kGroupBytes);
  problem.experts = experts;
  problem.sides = kMaxSides;
  problem.matrix_weights = k * 14336;
  problem.rows_per_expert = rows;
  problem.own_sort_bytes = OwnSortBytes(kMostOwnSelections);
  return problem;
}

using Parts = std::vector<std::pair<int, int>>;  ///< Offset and size.

void ExpectPartsApart(Parts parts, int shared_bytes, const DeviceShape& device) {
  std::sort(parts.begin(), parts.end());
  for (size_t i = 0; i + 1 < parts.size(); ++i) {
    EXPECT_LE(parts[i].first + parts[i].second, parts[i + 1].first) << "part " << i;
  }
  EXPECT_LE(parts.back().first + parts.back().second, shared_bytes);
  EXPECT_LE(shared_bytes, device.shared_bytes);
}

void ExpectApart(const ExpertTilesProblem& problem, const ExpertGemvPlan& plan,
                 const DeviceShape& device = {}) {
  const ExpertGemvArguments& args = plan.arguments;
  const int table = problem.kind == CodeKind::kTable4 ? kPairTableBytes : 0;
  const auto schedule = static_cast<int>(ScheduleBytes(problem.experts, 1));
  ExpectPartsApart({{0, args.warps * args.stages * problem.weights.tile_bytes},
                    {args.barriers_offset, args.warps * args.stages * kBarrierBytes},
                    {args.sums_offset, 2 * args.warps * kSumFloats * 4},
                    {args.table_offset, table},
                    {args.schedule_offset, schedule},
                    {args.own_sort_offset, static_cast<int>(problem.own_sort_bytes)},
                    {args.rows_offset, args.tile_rows * args.row_bytes}},
                   plan.shared_bytes, device);
  EXPECT_EQ(args.rows_offset % 16, 0);
  EXPECT_EQ(args.row_bytes % 16, 0);
  EXPECT_EQ(args.row_bytes % 128, 16) << "rows of a matrix in one bank";
}

TEST(ExpertGemvPlan, PartsFitSharedMemory) {
  for (const int bits : {2, 3, 4, 8, 16}) {
    for (const int64_t k : {0, 1, 128, 768, 2048, 2880, 4096, 7168, 14336, 28672, 65536}) {
      for (const int64_t rows : {1, 8, 9, 500}) {
        const ExpertTilesProblem problem = Problem(k, bits, rows);
        const auto plan = PlanExpertGemv(problem, DeviceShape());
        if (!plan) continue;
        SCOPED_TRACE(::testing::Message() << bits << " bits, k " << k << ", rows " << rows);
        ExpectApart(problem, *plan);
        EXPECT_GE(plan->arguments.tile_rows, 1);
        EXPECT_LE(plan->arguments.tile_rows, plan->octets * kOctet);
      }
    }
  }
}

/// The same problem with 2:4 weights, in `groups` groups per tile.
ExpertTilesProblem SparseProblem(int64_t k, int groups, int64_t rows) {
  ExpertTilesProblem problem = Problem(k, kSparseBits, rows);
  problem.weights.groups_per_tile = groups;
  problem.weights.tile_bytes = kSparseTileBytes + groups * kGroupBytes;
  return problem;
}

TEST(ExpertGemvPlan, PartsOfSparseTilesFitSharedMemory) {
  for (const int groups : {1, 2, 4, 8}) {
    for (const int64_t k : {1, 128, 768, 2048, 7168, 14336, 28672}) {
      for (const int64_t rows : {1, 9, 500}) {
        const ExpertTilesProblem problem = SparseProblem(k, groups, rows);
        SCOPED_TRACE(::testing::Message() << groups << " groups, k " << k << ", rows " << rows);
        const auto plan = PlanExpertGemv(problem, DeviceShape());
        ASSERT_TRUE(plan.has_value());
        ExpectApart(problem, *plan);
        // Bulk copies and 16-byte loads.
        EXPECT_EQ(problem.weights.tile_bytes % 16, 0);
        // As many warps share a unit as with dense tiles: sums have the same parts.
        EXPECT_EQ(plan->arguments.share_log2,
                  PlanExpertGemv(Problem(k, 4, rows), DeviceShape())->arguments.share_log2);
      }
    }
  }
}

TEST(ExpertGemvPlan, TilesHaveSixteenRowsOnlyForManyRows) {
  EXPECT_EQ(PlanExpertGemv(Problem(2048, 4, 7), DeviceShape())->octets, 1);
  EXPECT_EQ(PlanExpertGemv(Problem(2048, 4, 8), DeviceShape())->arguments.tile_rows, 16);
}

TEST(ExpertGemvPlan, SumsDoNotDependOnTheNumberOfRows) {
  for (const int64_t k : {128, 768, 2048, 7168, 14336}) {
    const auto few = PlanExpertGemv(Problem(k, 4, 1), DeviceShape());
    const auto many = PlanExpertGemv(Problem(k, 4, 100), DeviceShape());
    ASSERT_TRUE(few && many);
    EXPECT_EQ(few->arguments.share_log2, many->arguments.share_log2) << k;
  }
}

TEST(ExpertGemvPlan, WarpsThatShareAUnitAreBusyAndHaveThreeTiles) {
  for (const auto& [k, share] : {std::pair<int64_t, int>{0, 0},
                                 {128, 0},
                                 {384, 0},
                                 {640, 0},
                                 {768, 1},
                                 {896, 1},
                                 {2048, 2},
                                 {4096, 3},
                                 {14336, 4}}) {
    EXPECT_EQ(PlanExpertGemv(Problem(k), DeviceShape())->arguments.share_log2, share) << k;
  }
}

TEST(ExpertGemvPlan, RowsLargerThanSharedMemoryHaveNoPlan) {
  EXPECT_TRUE(PlanExpertGemv(Problem(28672), DeviceShape()).has_value());
  EXPECT_FALSE(PlanExpertGemv(Problem(int64_t{1} << 17), DeviceShape()).has_value());
  EXPECT_FALSE(PlanExpertGemv(Problem((int64_t{1} << 30) - 1), DeviceShape()).has_value());
}

/// Plans for several numbers of rows fit, and have the same sums.
void ExpectFitting(int64_t k, int bits, const DeviceShape& device) {
  const auto one = PlanExpertGemv(Problem(k, bits, 1), device);
  ASSERT_TRUE(one.has_value());
  EXPECT_EQ(one->arguments.warps & (one->arguments.warps - 1), 0);
  EXPECT_LE(1 << one->arguments.share_log2, one->arguments.warps);
  EXPECT_TRUE(!device.has_wgmma || one->arguments.warps == kExpertWarps);
  for (const int64_t rows : {1, 8, 500}) {
    ExpertTilesProblem problem = Problem(k, bits, rows);
    for (const int64_t sort : {int64_t{0}, OwnSortBytes(1), problem.own_sort_bytes}) {
      problem.own_sort_bytes = sort;
      const auto plan = PlanExpertGemv(problem, device);
      ASSERT_TRUE(plan.has_value());
      ExpectApart(problem, *plan, device);
      EXPECT_EQ(plan->arguments.warps, one->arguments.warps);
      EXPECT_EQ(plan->arguments.share_log2, one->arguments.share_log2);
    }
  }
}

TEST(ExpertGemvPlan, FitsEveryCard) {
  for (const Card& card : Cards()) {
    for (const int bits : {2, 3, 4, 8, 16}) {
      for (const int64_t k : {0, 128, 768, 2048, 2880, 4096, 7168, 14336, 16384}) {
        SCOPED_TRACE(::testing::Message() << card.name << ", " << bits << " bits, k " << k);
        ExpectFitting(k, bits, card.shape);
      }
    }
  }
}

TEST(ExpertGemvPlan, SmallSharedMemoryHasRoomForRows) {
  for (const Card& card : Cards()) {
    // Tables of 16 values take 32 KB.
    for (const auto& [k, rows] :
         {std::pair<int64_t, int>{768, 8}, {2048, 8}, {2880, 7}, {4096, 5}, {14336, 1}}) {
      EXPECT_GE(PlanExpertGemv(Problem(k), card.shape)->arguments.tile_rows, rows)
          << card.name << ", k " << k;
    }
  }
}

void ExpectApart(const ExpertTilesProblem& problem, const ExpertMmaPlan& plan,
                 const DeviceShape& device) {
  const ExpertMmaArguments& args = plan.arguments;
  const auto schedule = static_cast<int>(TileScheduleBytes(problem.experts, problem.sides));
  const int tile_bytes = problem.weights.tile_bytes;
  const auto stages = [&](int count, int rows) {
    return MmaStages{count, args.warps, tile_bytes}.Bytes(rows);
  };
  ExpectPartsApart({{0, stages(args.stages, args.tile_rows)},
                    {args.schedule_offset, schedule},
                    {args.tile_offset, kMmaExpertTileBytes}},
                   plan.shared_bytes, device);
  EXPECT_LE(stages(args.stages_of_few, args.tile_rows / 2), args.schedule_offset);
  EXPECT_LE(MmaExchangeBytes(args.warps), args.schedule_offset);
  EXPECT_EQ(args.schedule_offset % 16, 0);
  EXPECT_EQ(args.tile_offset % 16, 0);
  for (const int count : {args.stages, args.stages_of_few}) {
    EXPECT_GE(count, 2);
    EXPECT_LE(count, kMostMmaStages);
  }
  // The system's share of every CTA comes out of the multiprocessor's.
  constexpr int kReserved = 1024;
  EXPECT_LE(plan.resident * (plan.shared_bytes + kReserved), device.shared_bytes + kReserved);
}

void ExpectFitting(const ExpertTilesProblem& problem, bool gated, const DeviceShape& device) {
  const auto plan = PlanExpertMma(problem, gated, device);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->arguments.gated, gated);
  ExpectApart(problem, *plan, device);
}

TEST(ExpertMmaPlan, FitsEveryCard) {
  for (const Card& card : Cards()) {
    if (card.shape.has_wgmma) continue;
    for (const int bits : {2, 3, 4, 8, 16}) {
      for (const int64_t experts : {1, 8, 128, 512, 1024}) {
        SCOPED_TRACE(::testing::Message()
                     << card.name << ", " << bits << " bits, " << experts << " experts");
        for (const int64_t rows : {13, 40, 500}) {
          ExpectFitting(Problem(2048, bits, rows, experts), rows % 2 == 0, card.shape);
          ExpectFitting(Problem(2048, bits, rows, experts), rows % 2 != 0, card.shape);
        }
      }
    }
  }
}

TEST(ExpertMmaPlan, TilesAreWideOnlyForManyRows) {
  for (const Card& card : Cards()) {
    if (card.shape.has_wgmma) continue;
    const auto rows_of_tile = [&](int64_t rows) {
      return PlanExpertMma(Problem(2048, 4, rows), true, card.shape)->arguments.tile_rows;
    };
    EXPECT_EQ(rows_of_tile(13), 32) << card.name;
    EXPECT_LE(rows_of_tile(32), 64) << card.name;
    EXPECT_GE(rows_of_tile(500), 64) << card.name;
  }
}

TEST(ExpertMmaPlan, TakesTheRowsForWhichTheGemvKernelWouldReadWeightsTwice) {
  const auto problem_of = [](int64_t k, int64_t rows) {
    ExpertTilesProblem problem = Problem(k, 4, rows);
    problem.matrix_weights = k * 256;
    return problem;
  };
  for (const Card& card : Cards()) {
    for (const int64_t k : {2048, 14336}) {
      for (int64_t rows = 1; rows <= 16; ++rows) {
        SCOPED_TRACE(::testing::Message() << card.name << ", k " << k << ", rows " << rows);
        const ExpertTilesProblem problem = problem_of(k, rows);
        const int fit = PlanExpertGemv(problem, card.shape)->arguments.tile_rows;
        const bool many = card.shape.has_wgmma ? rows >= 13 : rows > fit || rows >= 13;
        EXPECT_EQ(PlanExpertMma(problem, false, card.shape).has_value(),
                  many && !card.shape.has_wgmma);
        EXPECT_EQ(PlanExpertWgmma(problem, false, card.shape).has_value(),
                  many && card.shape.has_wgmma);
      }
    }
  }
}

TEST(ExpertMmaPlan, ZerosAndBiasesTakeTheRegistersOfHalfTheRows) {
  for (const Card& card : Cards()) {
    if (card.shape.has_wgmma) continue;
    ExpertTilesProblem problem = Problem(2048, 4, 500);
    problem.use = ParameterUse::kAll;
    EXPECT_LE(PlanExpertMma(problem, true, card.shape)->arguments.tile_rows, 64) << card.name;
  }
}

TEST(ExpertWgmmaPlan, PartsFitSharedMemory) {
  const DeviceShape device;
  for (const int bits : {2, 3, 4, 8, 16}) {
    for (const int64_t experts : {1, 128, 1024, 5000}) {
      const bool gated = experts != 5000;
      const ExpertTilesProblem problem = Problem(2048, bits, 100, experts);
      SCOPED_TRACE(::testing::Message() << bits << " bits, " << experts << " experts");
      const auto plan = PlanExpertWgmma(problem, gated, device);
      ASSERT_TRUE(plan.has_value());
      const WgmmaArguments& gemm = plan->arguments.gemm;
      EXPECT_GE(gemm.slots, bits == 16 || experts == 5000 ? 2 : 3);
      EXPECT_LE(gemm.slots * StepActivationBytes(plan->arguments.tile_rows), gemm.weights_offset);
      EXPECT_LE(gemm.weights_offset + gemm.slots * kStripsOfBlock * problem.weights.tile_bytes,
                gemm.exchange_offset);
      EXPECT_LE(gemm.exchange_offset + kExchangeBytes, gemm.barriers_offset);
      EXPECT_LE(gemm.barriers_offset + (2 * gemm.slots + 1) * kBarrierBytes,
                plan->arguments.exchange_offset);
      EXPECT_LE(plan->arguments.exchange_offset + (gated ? kGatedExchangeBytes : 0),
                plan->arguments.schedule_offset);
      EXPECT_LE(plan->arguments.schedule_offset + TileScheduleBytes(experts, problem.sides),
                plan->shared_bytes);
      EXPECT_EQ(plan->arguments.schedule_offset % 4, 0);
      EXPECT_EQ(plan->arguments.exchange_offset % 16, 0);
      EXPECT_LE(plan->shared_bytes, device.shared_bytes);
    }
  }
}

TEST(ExpertWgmmaPlan, SparseTilesLeaveRoomForAsManyStages) {
  const DeviceShape device;
  for (const int64_t rows : {6, 16, 40, 64, 500}) {
    for (const bool gated : {false, true}) {
      const auto dense = PlanExpertWgmma(Problem(2048, 4, rows), gated, device);
      const auto sparse = PlanExpertWgmma(SparseProblem(2048, 1, rows), gated, device);
      ASSERT_TRUE(dense && sparse) << rows;
      EXPECT_EQ(sparse->arguments.tile_rows, dense->arguments.tile_rows) << rows;
      EXPECT_GE(sparse->arguments.gemm.slots, dense->arguments.gemm.slots) << rows;
      EXPECT_LE(sparse->shared_bytes, device.shared_bytes) << rows;
    }
  }
}

TEST(ExpertWgmmaPlan, NeedsRowsAndColumnsAndRoomForItsSchedule) {
  const DeviceShape device;
  EXPECT_TRUE(PlanExpertWgmma(Problem(2048, 4, 100), false, device));
  EXPECT_FALSE(PlanExpertWgmma(Problem(2048, 4, 1), false, device));
  EXPECT_FALSE(PlanExpertWgmma(Problem(0, 4, 100), false, device));
  EXPECT_FALSE(PlanExpertWgmma(Problem(2048, 4, 100, 50000), false, device));
}

TEST(ExpertWgmmaPlan, SmallMatricesOfNarrowCodesNeedMoreRows) {
  const DeviceShape device;
  const auto least = [&](int bits, int64_t weights) {
    for (int64_t rows = 1;; ++rows) {
      ExpertTilesProblem problem = Problem(2048, bits, rows);
      problem.matrix_weights = weights;
      if (PlanExpertWgmma(problem, false, device)) return rows;
    }
  };
  EXPECT_EQ(least(4, 2048 * 768), 13);
  EXPECT_EQ(least(3, 2880 * 2880), 13);
  EXPECT_EQ(least(4, 7168 * 2048), 6);
  EXPECT_EQ(least(8, 2048 * 768), 6);
}

TEST(ExpertWgmmaPlan, WidthsAreTheNarrowestThatFit) {
  EXPECT_EQ(MaxTileRows(4), 192);
  EXPECT_EQ(MaxTileRows(8), 128);
  for (int rows = 1; rows <= 192; ++rows) {
    const int width = WidthOf(rows);
    EXPECT_GE(RowsOfWidth(width), rows);
    EXPECT_TRUE(width == 0 || RowsOfWidth(width - 1) < rows) << rows;
  }
}

TEST(ExpertWgmmaPlan, StagesHoldTwiceTheRowsOfAnExpert) {
  const DeviceShape device;
  for (const auto& [rows, tile_rows] :
       {std::pair<int64_t, int>{6, 16}, {8, 16}, {9, 32}, {17, 64}, {64, 128}, {65, 192}}) {
    const auto plan = PlanExpertWgmma(Problem(2048, 4, rows), true, device);
    ASSERT_TRUE(plan.has_value()) << rows;
    EXPECT_EQ(plan->arguments.tile_rows, tile_rows) << rows;
    EXPECT_GE(plan->arguments.gemm.slots, tile_rows == 192 ? 3 : 4) << rows;
  }
  EXPECT_EQ(PlanExpertWgmma(Problem(2048, 8, 100), true, device)->arguments.tile_rows, 128);
}

TEST(ExpertSort, HistogramsFitEveryCard) {
  for (const Card& card : Cards()) {
    for (const int64_t experts : {8, 128, 1024, 4096}) {
      const int warps = SortWarpsFor(int64_t{1} << 20, experts, card.shape);
      ASSERT_GE(warps, 1) << card.name << ", " << experts;
      EXPECT_LE(SortBytes(experts, warps), card.shape.shared_bytes) << card.name << ", " << experts;
    }
  }
}

TEST(ExpertSort, HistogramsFitSharedMemory) {
  const DeviceShape device;
  EXPECT_EQ(SortWarpsFor(8, 128, device), 1);
  EXPECT_EQ(SortWarpsFor(512, 128, device), 16);
  EXPECT_EQ(SortWarpsFor(int64_t{1} << 20, 128, device), kMaxSortWarps);
  EXPECT_EQ(SortPartsFor(512), 1);
  EXPECT_EQ(SortPartsFor(8192), 8);
  EXPECT_EQ(SortWarpsFor(8192, 128, device), kMaxSortWarps);
  EXPECT_EQ(SortPartsFor(int64_t{1} << 20), kMaxSortParts);
  for (const int64_t experts : {1, 1024, 4096, 50000}) {
    const int warps = SortWarpsFor(int64_t{1} << 20, experts, device);
    ASSERT_GE(warps, 1) << experts;
    EXPECT_LE(SortBytes(experts, warps), device.shared_bytes) << experts;
  }
  EXPECT_EQ(SortWarpsFor(8, 100000, device), 0);
}

TEST(ValueRecord, TheFirstErrorHasTheSmallestKey) {
  const auto bias = RouterKey(LogitError::kNaNBias, 0, 1000);
  const auto first = RouterKey(LogitError::kInf, 0, 7);
  EXPECT_LT(bias, first);
  EXPECT_LT(first, RouterKey(LogitError::kNaN, 0, 8));
  EXPECT_LT(RouterKey(LogitError::kNoFinite, 0, 1 << 20), RouterKey(LogitError::kNaN, 1, 0));
  EXPECT_LT(RouterKey(LogitError::kNaN, (1 << 30) - 1, 0), ValueRecord::kNone);
}

}  // namespace
}  // namespace marlin::cuda::experts_plan_test
