// Plans of latent attention: tiles for every row, parts of the keys where tiles are few.
#include <gtest/gtest.h>

#include "backends/cuda/attention/attention_layout.h"
#include "backends/cuda/attention/attention_plan.h"
#include "base/checked.h"

namespace marlin::cuda::latent_attention_plan_test {
namespace {

AttentionPlan PlanOf(int64_t rows, int64_t sequences, int64_t group, int64_t length) {
  return PlanLatentAttention({rows, sequences, 1, group, 512, length}, DeviceShape());
}

TEST(LatentAttentionPlan, HasTilesForEveryDivisionOfRows) {
  for (const int64_t group : {1, 16, 20, 128}) {
    for (const int64_t sequences : {1, 3, 100}) {
      for (const int64_t rows : {1, 7, 100, 5000}) {
        if (rows < sequences) continue;
        const AttentionPlan plan = PlanOf(rows, sequences, group, 4096);
        // The most tiles: all sequences but one have one row.
        const int64_t of_one = CeilDivide(group, int64_t{plan.tile_rows});
        const int64_t of_rest = CeilDivide((rows - sequences + 1) * group, int64_t{plan.tile_rows});
        EXPECT_GE(plan.tiles, (sequences - 1) * of_one + of_rest) << rows << " in " << sequences;
      }
    }
  }
}

TEST(LatentAttentionPlan, SplitsKeysWhereTilesAreFew) {
  // A token of 16 heads: a part has two blocks of 64 keys or more.
  EXPECT_EQ(PlanOf(1, 1, 16, 4096).segments, 32);
  EXPECT_EQ(PlanOf(1, 1, 16, 65536).segments, 64);
  EXPECT_EQ(PlanOf(1, 1, 16, 64).segments, 1);
  EXPECT_EQ(PlanOf(64, 64, 16, 4096).segments, 2);
  EXPECT_EQ(PlanOf(4096, 1, 16, 4096).segments, 1);
  // 128 heads fill tiles of 32 rows.
  EXPECT_EQ(PlanOf(1, 1, 16, 4096).tile_rows, 16);
  EXPECT_EQ(PlanOf(1, 1, 128, 65536).tile_rows, 32);
  EXPECT_EQ(PlanOf(1, 1, 128, 65536).segments, 33);
  const AttentionPlan plan = PlanOf(1, 1, 16, 4096);
  EXPECT_EQ(plan.partial_bytes, plan.tiles * 32 * PartialFloats(16, 512) * int64_t{4});
  EXPECT_EQ(PlanOf(1, 1, 16, 64).partial_bytes, 0);
}

TEST(LatentAttentionPlan, WideHeadsOfSeveralTokensAreItsTiles) {
  // Rows, sequences, KV heads, group, value_dim, length, key_dim.
  EXPECT_TRUE(TakesWideTiles({2048, 1, 4, 8, 512, 2048, 512}));
  EXPECT_TRUE(TakesWideTiles({4, 1, 4, 8, 512, 2048, 512}));
  EXPECT_TRUE(TakesWideTiles({2048, 1, 4, 8, 64, 2048, 320}));
  EXPECT_FALSE(TakesWideTiles({3, 1, 4, 8, 512, 2048, 512})) << "tiles would be half empty";
  EXPECT_FALSE(TakesWideTiles({64, 64, 4, 32, 512, 2048, 512})) << "a token of each sequence";
  EXPECT_FALSE(TakesWideTiles({2048, 1, 4, 8, 256, 2048, 256})) << "prefill takes them";
  EXPECT_FALSE(TakesWideTiles({2048, 1, 4, 8, 512, 2048, 256})) << "values do not fit in keys";
}

}  // namespace
}  // namespace marlin::cuda::latent_attention_plan_test
