#include "backends/metal/moe/expert_tiling.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <random>
#include <vector>

namespace marlin::metal::expert_tiling_test {
namespace {

/// The tiles that a routing has.
struct Tiles {
  int64_t few = 0;
  int64_t many = 0;
};

void AddRows(int64_t rows, const ExpertTiling& tiling, Tiles* tiles) {
  if (rows <= tiling.most_few_rows) {
    tiles->few += (rows + tiling.few_tile_rows - 1) / tiling.few_tile_rows;
  } else {
    tiles->many += (rows + tiling.many_tile_rows - 1) / tiling.many_tile_rows;
  }
}

/// Deals the selections out to some of the experts: evenly, all to one, or at random with a bias.
Tiles TilesOfRouting(const ExpertPass& pass, const ExpertTiling& tiling, int shape,
                     std::mt19937* random) {
  std::vector<int64_t> rows(static_cast<size_t>(pass.present), 0);
  for (int64_t i = 0; i < pass.selections() && !rows.empty(); ++i) {
    const size_t count = rows.size();
    const std::array<size_t, 4> choices = {static_cast<size_t>(i) % count, 0, (*random)() % count,
                                           (*random)() % count * ((*random)() % count) / count};
    ++rows[choices[static_cast<size_t>(shape)]];
  }
  Tiles tiles;
  for (const int64_t count : rows) AddRows(count, tiling, &tiles);
  if (pass.shared) AddRows(pass.tokens, tiling, &tiles);
  return tiles;
}

/// Compares the room with the tiles of some routings.
void ExpectRoom(const ExpertPass& pass, std::mt19937* random) {
  const ExpertTiling tiling = TileExperts(pass, {});
  for (int shape = 0; shape < 4; ++shape) {
    const Tiles tiles = TilesOfRouting(pass, tiling, shape, random);
    ASSERT_LE(tiles.few, tiling.few_tiles) << pass.tokens << " " << pass.top_k << " " << shape;
    ASSERT_LE(tiles.many, tiling.many_tiles) << pass.tokens << " " << pass.top_k << " " << shape;
  }
}

TEST(ExpertTiling, HasRoomForEveryRouting) {
  std::mt19937 random(1);
  for (const int64_t tokens : {1, 2, 3, 16, 17, 40, 257, 1000}) {
    for (const int64_t top_k : {1, 2, 8, 32}) {
      for (const int64_t present : {0, 1, 3, 17, 128, 1024}) {
        ExpectRoom({tokens, top_k, present, false, false}, &random);
        ExpectRoom({tokens, top_k, present, true, false}, &random);
        ExpectRoom({tokens, top_k, present, true, true}, &random);
      }
    }
  }
}

TEST(ExpertTiling, DecodeHasOneRowPerTile) {
  const ExpertTiling tiling = TileExperts({1, 8, 128, true, false}, {});
  EXPECT_EQ(tiling.few_tile_rows, 1);
  EXPECT_EQ(tiling.few_tiles, 9);
  EXPECT_EQ(tiling.many_tiles, 0);
}

TEST(ExpertTiling, TilesGrowWithTheRows) {
  EXPECT_EQ(TileExperts({64, 8, 128, false, false}, {}).few_tile_rows, 8);
  EXPECT_EQ(TileExperts({64, 8, 128, false, false}, {}).many_tile_rows, 32);
  EXPECT_EQ(TileExperts({4096, 8, 128, false, false}, {}).few_tile_rows, 16);
  EXPECT_EQ(TileExperts({4096, 8, 128, false, false}, {}).many_tile_rows, 64);
}

TEST(ExpertTiling, BatchInvarianceAndUnknownFragmentsTakeTheGemv) {
  DeviceShape unknown;
  unknown.known_fragments = false;
  for (const ExpertTiling& tiling : {TileExperts({4096, 8, 128, true, true}, {}),
                                     TileExperts({4096, 8, 128, true, false}, unknown)}) {
    EXPECT_EQ(tiling.most_few_rows, std::numeric_limits<int32_t>::max());
    EXPECT_EQ(tiling.many_tiles, 0);
  }
}

TEST(ExpertTiling, PassesBoundTheWorkspaceAndTheTime) {
  LayerExperts layer;
  layer.hidden = 1024;
  ExpertsProblem problem;
  problem.tokens = 5000;
  problem.top_k = 8;
  EXPECT_EQ(TokensOfPass(problem, layer, 512, {}), 5000);
  EXPECT_EQ(TokensOfPass(problem, layer, 512, {8 * 4 * (512 + 1024) * 100, 1 << 30}), 100);
  EXPECT_EQ(TokensOfPass(problem, layer, 512, {int64_t{1} << 40, 6 * 8 * 1024 * 7 + 1}), 7);
  EXPECT_EQ(TokensOfPass(problem, layer, 512, {1, 1}), 1);
}

}  // namespace
}  // namespace marlin::metal::expert_tiling_test
