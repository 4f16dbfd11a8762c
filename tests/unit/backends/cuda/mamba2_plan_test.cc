// The plan of Mamba2: which sequences run in chunks, and bounds on those and their parts.
#include "backends/cuda/recurrent/mamba2/mamba2_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "backends/cuda/recurrent/chunked/chunk_plan.h"
#include "backends/cuda/recurrent/chunked/chunk_shared.h"
#include "backends/cuda/recurrent/mamba2/ssd_layout.h"
#include "backends/cuda/recurrent/mamba2/ssd_shared.h"
#include "cards.h"

namespace marlin::cuda::mamba2_plan_test {
namespace {

constexpr int kMultiprocessors = 132;
constexpr Mamba2Sizes kSizes = {64, 1, 64, 128, 4};  // Heads, groups, head_dim, state_size, width.

Mamba2Plan PlanOf(const Mamba2Sizes& sizes, int64_t rows, int64_t sequences,
                  Determinism determinism = Determinism::kDefault, bool quads = true) {
  return PlanMamba2(sizes, rows, sequences, quads, determinism, kMultiprocessors);
}

TEST(Mamba2Plan, LongSequencesRunInChunks) {
  EXPECT_TRUE(PlanOf(kSizes, 2048, 1).chunks);
  EXPECT_TRUE(PlanOf({24, 1, 64, 256, 4}, 2048, 1).chunks);
  EXPECT_FALSE(PlanOf(kSizes, 1, 1).chunks);
  EXPECT_FALSE(PlanOf(kSizes, 64, 64).chunks);
  EXPECT_FALSE(PlanOf(kSizes, 2048, 1, Determinism::kBatchInvariant).chunks);
  EXPECT_FALSE(PlanOf(kSizes, 2048, 1, Determinism::kDefault, false).chunks);
  EXPECT_FALSE(PlanOf({64, 1, 80, 128, 4}, 2048, 1).chunks) << "columns of a scan do not fit";
  EXPECT_FALSE(PlanOf({64, 1, 64, 96, 4}, 2048, 1).chunks) << "no kernel has such a state";
}

TEST(Mamba2Plan, PartsOfChunksAreThoseOfATurn) {
  const SsdLayout layout = {1, 64, 128, 64};
  const Mamba2Plan one = PlanOf(kSizes, 128, 1);
  EXPECT_EQ(one.most_chunks, 2);
  EXPECT_EQ(one.part_bytes, 2 * layout.ChunkFloats() * 4);
  EXPECT_EQ(PlanOf(kSizes, 1 << 20, 1).part_bytes, kTurnChunks * layout.ChunkFloats() * 4);
  EXPECT_EQ(PlanOf(kSizes, 1, 1).part_bytes, 0);
}

// Bulk copies need 16 bytes.
TEST(Mamba2Plan, EveryPartOfAChunkIsAligned) {
  for (const int key_dim : {64, 128, 256}) {
    for (const int value_dim : {32, 64, 96, 128}) {
      const SsdLayout layout = {3, 6, key_dim, value_dim};
      EXPECT_EQ(layout.PairAt(1, 2) % 4, 0);
      EXPECT_EQ(layout.HeadAt(1, 5) % 4, 0);
      EXPECT_EQ(layout.PairAt(1, 0), layout.HeadAt(0, 5) + layout.HeadFloats()) << "no gap";
    }
  }
}

TEST(Mamba2Plan, ThereAreNoMoreChunksThanPlanned) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const int sequences = 1 + static_cast<int>(random() % 9);
    int64_t rows = 0;
    int64_t chunks = 0;
    for (int s = 0; s < sequences; ++s) {
      const int64_t own = random() % 3 == 0 ? random() % 400 : random() % 40;
      rows += own;
      if (own > kMostRecurrentRows) chunks += (own + kChunkRows - 1) / kChunkRows;
    }
    ASSERT_LE(chunks, MostChunks(rows, sequences)) << rows << " rows of " << sequences;
  }
}

// What runs where a kernel's first choice does not fit needs no more than the smallest card has.
TEST(Mamba2Plan, ChunksFitEveryCard) {
  int smallest = DeviceShape().shared_bytes;
  for (const Card& card : Cards()) smallest = std::min(smallest, card.shape.shared_bytes);
  EXPECT_LE((SsdScanShared<64, false>::kBytes), smallest);
  EXPECT_LE((SsdScanShared<128, false>::kBytes), smallest);
  EXPECT_LE((SsdScanShared<256, false>::kBytes), smallest);
  EXPECT_LE((SsdScanShared<256, true>::kBytes), DeviceShape().shared_bytes);
  EXPECT_LE((DeltaScanShared<64, false>::kBytes), smallest);
  EXPECT_LE((DeltaScanShared<128, false>::kBytes), smallest);
  EXPECT_LE((DeltaScanShared<128, true>::kBytes), DeviceShape().shared_bytes);
  for (const int key_dim : {64, 128}) {
    const ChunkLayout layout = {1, 1, key_dim, 128};
    EXPECT_LE(DeltaLocalShared{layout.KeyFloats()}.Bytes(), smallest) << key_dim;
  }
  EXPECT_LE(RecurrentShared({kMostRecurrentKeys, kSliceColumns}).Bytes(), smallest);
}

TEST(Mamba2Plan, FewHeadsAreDividedAmongMoreBlocks) {
  EXPECT_EQ(PlanOf({24, 1, 64, 128, 4}, 1, 1).slice_columns, 32);
  EXPECT_EQ(PlanOf({24, 1, 64, 128, 4}, 8, 8).slice_columns, 64);
  EXPECT_EQ(PlanOf({128, 8, 64, 128, 4}, 1, 1).slice_columns, 64);
}

}  // namespace
}  // namespace marlin::cuda::mamba2_plan_test
