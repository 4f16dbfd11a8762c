// Plans of attention: tiles for every row, split-KV only where tiles leave the device idle.
#include "backends/cuda/attention/attention_plan.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "backends/cuda/attention/attention_layout.h"
#include "backends/cuda/attention/decode/decode_layout.h"
#include "backends/cuda/attention/exact/exact_attention_layout.h"
#include "backends/cuda/attention/latent/latent_layout.h"
#include "backends/cuda/attention/prefill/mma_layout.h"
#include "base/checked.h"
#include "cards.h"

namespace marlin::cuda::attention_plan_test {
namespace {

AttentionPlan PlanOf(int64_t rows, int64_t sequences, int64_t length) {
  return PlanAttention({rows, sequences, 4, 8, 128, length}, DeviceShape());
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
  EXPECT_EQ(PlanAttention({1, 1, 4, 4, 128, 100}, DeviceShape()).tile_rows, 4);
  EXPECT_EQ(PlanAttention({1, 1, 4, 5, 128, 100}, DeviceShape()).tile_rows, 16);
  EXPECT_EQ(PlanAttention({8, 8, 4, 4, 128, 100}, DeviceShape()).tile_rows, 4);
}

TEST(AttentionPlan, SumsThatWouldFillMemoryAreNotSplit) {
  const AttentionPlan plan = PlanAttention({1, 1, 2, 128, 512, int64_t{1} << 20}, DeviceShape());
  EXPECT_EQ(plan.segments, 0);
}

AttentionPlan MatrixPlanOf(int64_t rows, int64_t sequences, int64_t length) {
  return PlanMatrixAttention({rows, sequences, 4, 8, 128, length}, DeviceShape());
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
  const AttentionPlan plan = PlanMatrixAttention({3, 3, 1, 20, 64, 100}, DeviceShape());
  EXPECT_EQ(plan.tiles, 6);
  EXPECT_EQ(plan.tile_rows, kDecodeHeads);
}

TEST(MatrixAttentionPlan, PrefillTakesTilesWhereTheyOccupyTheDevice) {
  const AttentionPlan prompt = MatrixPlanOf(2048, 1, 2048);
  EXPECT_EQ(prompt.segments, 0);
  EXPECT_EQ(prompt.tile_rows, 128);
  EXPECT_GE(prompt.tiles, 2048 * 8 / 128);
  const AttentionPlan wide = PlanMatrixAttention({2048, 1, 4, 8, 256, 2048}, DeviceShape());
  EXPECT_EQ(wide.tile_rows, 64) << "sums of 256 features fill the registers of one warpgroup";
  EXPECT_GE(wide.tiles, 2048 * 8 / 64);
  AttentionShape widest = {2048, 1, 4, 8, 512, 2048, 512};
  EXPECT_EQ(PlanMatrixAttention(widest, DeviceShape()).segments, 1) << "no tile has such sums";
  widest.value_dim = 128;
  EXPECT_EQ(PlanMatrixAttention(widest, DeviceShape()).segments, 1) << "nor such keys";
  // A few tokens behind many keys: their tiles would leave the device idle.
  EXPECT_GT(MatrixPlanOf(16, 1, 8192).segments, 1);
}

/// Calls run(key_dim, value_dim, fp8) for heads up to a number of features.
template <typename Run>
void ForHeads(int most, const Run& run) {
  for (int key_dim = 16; key_dim <= most; key_dim += 16) {
    for (int value_dim = 16; value_dim <= most; value_dim += 16) {
      for (const bool fp8 : {false, true}) run(key_dim, value_dim, fp8);
    }
  }
}

TEST(AttentionShapes, DecodeFitsEveryCard) {
  for (const Card& card : Cards()) {
    const int most = card.shape.shared_bytes;
    ForHeads(kMostMatrixFeatures, [&](int key_dim, int value_dim, bool fp8) {
      const DecodeShape shape = DecodeShapeFor(key_dim, value_dim, fp8, most);
      EXPECT_LE(shape.Bytes(key_dim, value_dim, fp8), most)
          << card.name << " " << key_dim << " " << value_dim << " " << fp8;
      EXPECT_GE(shape.tiles * shape.slices * 16, value_dim);
      // The queries' sums of 256 features or more are of two warps.
      EXPECT_TRUE(key_dim <= kMostTileFeatures || shape.slices > 1);
    });
  }
}

TEST(AttentionShapes, DecodeTakesTheShapesOfAnH200) {
  const int most = DeviceShape().shared_bytes;
  EXPECT_EQ(DecodeShapeFor(64, 64, false, most), (DecodeShape{4, 1}));
  EXPECT_EQ(DecodeShapeFor(128, 128, false, most), (DecodeShape{8, 1}));
  EXPECT_EQ(DecodeShapeFor(256, 256, true, most), (DecodeShape{16, 1}));
  EXPECT_EQ(DecodeShapeFor(512, 512, false, most), (DecodeShape{16, 2}));
  EXPECT_EQ(DecodeShapeFor(512, 64, false, most), (DecodeShape{16, 2}));
  constexpr int kSmall = 99 * 1024;
  EXPECT_EQ(DecodeShapeFor(128, 128, false, kSmall), (DecodeShape{8, 1}));
  EXPECT_EQ(DecodeShapeFor(256, 256, false, kSmall), (DecodeShape{8, 2}));
  EXPECT_EQ(DecodeShapeFor(512, 512, false, kSmall), (DecodeShape{8, 4}));
}

TEST(AttentionShapes, PrefillOnMmaFitsEveryCard) {
  for (const Card& card : Cards()) {
    const int most = card.shape.shared_bytes;
    ForHeads(kMostTileFeatures, [&](int key_dim, int value_dim, bool fp8) {
      for (const int terms : {1, 2}) {
        const MmaHeads heads = {key_dim, value_dim, terms, fp8};
        const MmaAttentionShape shape = MmaShapeFor(heads, most);
        EXPECT_LE(shape.Bytes(heads), most)
            << card.name << " " << key_dim << " " << value_dim << " " << terms << " " << fp8;
        EXPECT_GE(shape.features, value_dim);
        EXPECT_EQ(kCachePageTokens % shape.keys, 0);
      }
    });
  }
}

TEST(AttentionShapes, PrefillOnMmaHasEightWarpsWhereTheyFit) {
  constexpr int kSmall = 99 * 1024;
  constexpr int kA100 = 163 * 1024;
  EXPECT_EQ(MmaShapeFor({64, 64, 2, false}, kSmall), (MmaAttentionShape{8, 64, 64}));
  EXPECT_EQ(MmaShapeFor({128, 128, 2, false}, kSmall), (MmaAttentionShape{8, 32, 128}));
  EXPECT_EQ(MmaShapeFor({128, 128, 1, true}, kSmall), (MmaAttentionShape{8, 64, 128}));
  EXPECT_EQ(MmaShapeFor({128, 128, 2, false}, kA100), (MmaAttentionShape{8, 64, 128}));
  EXPECT_EQ(MmaShapeFor({192, 128, 2, false}, kSmall), (MmaAttentionShape{4, 32, 128}));
  EXPECT_EQ(MmaShapeFor({256, 256, 2, false}, kSmall), (MmaAttentionShape{4, 16, 256}));
  EXPECT_EQ(MmaShapeFor({256, 256, 2, false}, kA100), (MmaAttentionShape{4, 32, 256}));
}

TEST(AttentionShapes, LatentsFitEveryCard) {
  for (const Card& card : Cards()) {
    const int most = card.shape.shared_bytes;
    for (int key_dim = 16; key_dim <= kMostLatentKeyFeatures; key_dim += 16) {
      for (const int rows : {16, 32}) {
        for (const bool fp8 : {false, true}) {
          const int keys = LatentKeysFor(rows, key_dim, fp8, most);
          EXPECT_LE(LatentBytes(rows, keys, key_dim, fp8), most) << card.name << " " << key_dim;
        }
      }
    }
    const bool large = most > 200 * 1024;
    EXPECT_EQ(LatentKeysFor(32, 576, false, most), large ? 64 : 32) << card.name;
  }
}

TEST(AttentionShapes, ExactTilesFitEveryCard) {
  for (const Card& card : Cards()) {
    const int most = card.shape.shared_bytes;
    for (int key_dim = 1; key_dim <= kMostKeyFeatures; ++key_dim) {
      for (const int rows : {4, 16}) {
        const ExactTile tile = ExactTileFor(rows, key_dim, most);
        EXPECT_LE(tile.Bytes(key_dim), most) << card.name << " " << key_dim;
        EXPECT_LE(tile.rows, rows);
      }
    }
    EXPECT_EQ(ExactTileFor(16, 256, most).rows, 16);
    EXPECT_FALSE(ExactTileFor(16, 576, most).in_parts);
  }
}

TEST(AttentionShapes, PlansAreForTheCard) {
  for (const Card& card : Cards()) {
    SCOPED_TRACE(card.name);
    const DeviceShape& device = card.shape;
    const AttentionPlan one = PlanMatrixAttention({1, 1, 8, 4, 128, 65536, 128}, device);
    // CTAs of all parts are resident together.
    EXPECT_LE(one.segments * 8, 2 * device.multiprocessors);
    EXPECT_GE(one.segments * 8 * 2, std::min(device.multiprocessors, 32 * 8));
    for (const int64_t features : {64, 128, 256}) {
      AttentionShape prompt = {2048, 1, 4, 8, features, 2048, features};
      for (const bool fp8 : {false, true}) {
        prompt.fp8 = fp8;
        const AttentionPlan plan = PlanMatrixAttention(prompt, device);
        EXPECT_EQ(plan.segments, 0);
        EXPECT_GE(plan.tiles * plan.tile_rows, 2048 * 8);
        if (device.has_wgmma) continue;
        const MmaHeads heads = {static_cast<int>(features), static_cast<int>(features), 2, fp8};
        EXPECT_EQ(plan.tile_rows, MmaShapeFor(heads, device.shared_bytes).Rows());
      }
    }
  }
}

}  // namespace
}  // namespace marlin::cuda::attention_plan_test
