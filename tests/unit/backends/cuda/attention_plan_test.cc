// Plans of attention: tiles for every row, split-KV only where tiles leave the device idle.
#include "backends/cuda/attention/attention_plan.h"

#include <gtest/gtest.h>

#include "backends/cuda/attention/attention_layout.h"
#include "base/checked.h"

namespace marlin::cuda::attention_plan_test {
namespace {

constexpr int kMultiprocessors = 132;

AttentionPlan PlanOf(int64_t rows, int64_t sequences, int64_t length) {
  return PlanAttention({rows, sequences, 4, 8, 128, length}, kMultiprocessors);
}

TEST(AttentionPlan, HasTilesForEveryDivisionOfRows) {
  for (const int64_t sequences : {1, 3, 100}) {
    for (const int64_t rows : {1, 7, 100, 5000}) {
      if (rows < sequences) continue;
      const AttentionPlan plan = PlanOf(rows, sequences, 4096);
      // The most tiles: all sequences but one have one row.
      const int64_t of_one = CeilDivide(int64_t{8}, int64_t{plan.tile_rows});
      const int64_t of_rest = CeilDivide((rows - sequences + 1) * 8, int64_t{plan.tile_rows});
      EXPECT_GE(plan.tiles, (sequences - 1) * of_one + of_rest) << rows << " in " << sequences;
    }
  }
}

TEST(AttentionPlan, SplitsKeysWhereTilesAreFew) {
  EXPECT_EQ(PlanOf(1, 1, 4096).segments, 32);
  EXPECT_EQ(PlanOf(1, 1, kSegmentKeys).segments, 0);
  EXPECT_EQ(PlanOf(4096, 1, 4096).segments, 0);
  EXPECT_EQ(PlanOf(128, 128, 4096).segments, 0);
  const AttentionPlan plan = PlanOf(1, 1, 4096);
  EXPECT_EQ(plan.partial_bytes,
            plan.tiles * 4 * 32 * PartialFloats(plan.tile_rows, 128) * int64_t{4});
}

TEST(AttentionPlan, SmallTilesAreForFewRowsOfASequence) {
  EXPECT_EQ(PlanAttention({1, 1, 4, 4, 128, 100}, kMultiprocessors).tile_rows, 4);
  EXPECT_EQ(PlanAttention({1, 1, 4, 5, 128, 100}, kMultiprocessors).tile_rows, 16);
  EXPECT_EQ(PlanAttention({8, 8, 4, 4, 128, 100}, kMultiprocessors).tile_rows, 4);
}

TEST(AttentionPlan, SumsThatWouldFillMemoryAreNotSplit) {
  const AttentionPlan plan = PlanAttention({1, 1, 2, 128, 512, int64_t{1} << 20}, kMultiprocessors);
  EXPECT_EQ(plan.segments, 0);
}

AttentionPlan MatrixPlanOf(int64_t rows, int64_t sequences, int64_t length) {
  return PlanMatrixAttention({rows, sequences, 4, 8, 128, length}, kMultiprocessors);
}

TEST(MatrixAttentionPlan, DecodeSplitsKeysToOccupyTheDevice) {
  const AttentionPlan one = MatrixPlanOf(1, 1, 1024);
  EXPECT_EQ(one.tiles, 1);
  EXPECT_EQ(one.segments, 16) << "no more parts than blocks of keys";
  EXPECT_EQ(one.partial_bytes, 4 * 16 * PartialFloats(kDecodeHeads, 128) * int64_t{4});
  EXPECT_EQ(MatrixPlanOf(1, 1, 1 << 20).segments, 32) << "one CTA merges them";
  EXPECT_EQ(MatrixPlanOf(8, 8, 4096).segments, 8);
  const AttentionPlan many = MatrixPlanOf(128, 128, 4096);
  EXPECT_EQ(many.segments, 1);
  EXPECT_EQ(many.partial_bytes, 0);
}

TEST(MatrixAttentionPlan, DecodeHasTilesForAllHeadsOfAGroup) {
  const AttentionPlan plan = PlanMatrixAttention({3, 3, 1, 20, 64, 100}, kMultiprocessors);
  EXPECT_EQ(plan.tiles, 6);
  EXPECT_EQ(plan.tile_rows, kDecodeHeads);
}

TEST(MatrixAttentionPlan, PrefillTakesTilesWhereTheyOccupyTheDevice) {
  const AttentionPlan prompt = MatrixPlanOf(2048, 1, 2048);
  EXPECT_EQ(prompt.segments, 0);
  EXPECT_EQ(prompt.tile_rows, 128);
  EXPECT_GE(prompt.tiles, 2048 * 8 / 128);
  const AttentionPlan wide = PlanMatrixAttention({2048, 1, 4, 8, 256, 2048}, kMultiprocessors);
  EXPECT_EQ(wide.tile_rows, 64) << "sums of 256 features fill the registers of one warpgroup";
  EXPECT_GE(wide.tiles, 2048 * 8 / 64);
  AttentionShape widest = {2048, 1, 4, 8, 512, 2048, 512};
  EXPECT_EQ(PlanMatrixAttention(widest, kMultiprocessors).segments, 1) << "no tile has such sums";
  widest.value_dim = 128;
  EXPECT_EQ(PlanMatrixAttention(widest, kMultiprocessors).segments, 1) << "nor such keys";
  // A few tokens behind many keys: their tiles would leave the device idle.
  EXPECT_GT(MatrixPlanOf(16, 1, 8192).segments, 1);
}

}  // namespace
}  // namespace marlin::cuda::attention_plan_test
