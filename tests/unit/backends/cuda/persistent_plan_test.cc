// How the persistent kernel's phases are dealt to CTAs.
#include "backends/cuda/persistent/persistent_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/persistent/persistent_deal_layout.h"

namespace marlin::cuda::persistent_plan_test {
namespace {

constexpr int kBlocks = 132;
constexpr int kSharedBytes = 232448;

PhaseGemm Gemm(int n, int k, int sides = 1, int copies = 1, int segments = 1,
               Phase phase = Phase::kQkv) {
  PhaseGemm gemm;
  gemm.weights.n = n;
  gemm.weights.k = k;
  gemm.weights.tiles_of_strip = (k + kTileK - 1) / kTileK;
  gemm.weights.tile_bytes = 2112;
  gemm.n = n;
  gemm.strips = (n + kStripOutputs - 1) / kStripOutputs;
  gemm.sides = sides;
  gemm.copies = copies;
  gemm.segments = segments;
  gemm.k_tiles = segments * gemm.weights.tiles_of_strip;
  SplitPhase(phase, kBlocks, &gemm);
  return gemm;
}

/// Two matrices of the same inputs, with different outputs.
PhaseGemm Pair(int n, int up_n, int k) {
  PhaseGemm gemm = Gemm(n, k, 2);
  gemm.up_n = up_n;
  SplitPhase(Phase::kQkv, kBlocks, &gemm);
  return gemm;
}

/// The layers of Qwen3-30B-A3B, of Llama-3-8B, of shapes that divide by nothing, and queries with
/// latents.
std::vector<PhaseGemm> Gemms() {
  return {Gemm(5120, 2048),          Gemm(2048, 4096),     Gemm(1536, 2048, 1, 8),
          Gemm(2048, 768, 1, 1, 8),  Gemm(6144, 4096),     Gemm(4096, 14336),
          Gemm(14336, 4096, 2),      Gemm(100, 200),       Gemm(36, 2880, 2, 3),
          Gemm(2880, 2880, 1, 1, 4), Gemm(32, 128, 1, 1),  Pair(3072, 576, 2048),
          Pair(100, 300, 200),       Pair(1536, 576, 5120)};
}

/// The tile's place along k and in its matrix.
void ExpectPlace(const PhaseGemm& gemm, const BlockSchedule& schedule, const ScheduledTile& tile) {
  const ScheduledUnit& unit = schedule.units[tile.unit];
  EXPECT_GE(tile.k_tile, schedule.header.first_k_tile);
  EXPECT_LT(tile.k_tile, schedule.header.end_k_tile);
  EXPECT_EQ(tile.side, unit.side);
  const int segment = tile.k_tile * gemm.segment_factor >> kSegmentBits;
  const int of_segment = tile.k_tile - segment * gemm.weights.tiles_of_strip;
  EXPECT_EQ(tile.selection, gemm.segments > 1 ? segment : unit.copy);
  const int strip = static_cast<int>(unit.output) / kStripOutputs;
  EXPECT_EQ(int64_t{tile.offset} * 16, TileOffset(gemm.weights, strip, of_segment));
}

void ExpectWarps(const BlockSchedule& schedule) {
  std::vector<uint32_t> warps(schedule.units.size());
  const int tiles = schedule.header.tiles;
  for (int warp = 0; warp < kPersistentWarps; ++warp) {
    for (int i = TilesBefore(warp, tiles); i < TilesBefore(warp + 1, tiles); ++i) {
      warps[schedule.tiles[static_cast<size_t>(i)].unit] |= 1U << warp;
    }
  }
  EXPECT_EQ(TilesBefore(kPersistentWarps, tiles), tiles);
  for (size_t i = 0; i < warps.size(); ++i) EXPECT_EQ(schedule.units[i].warps, warps[i]);
}

TEST(PersistentPlan, EveryTileHasOneBlockAndOneWarp) {
  for (const PhaseGemm& gemm : Gemms()) {
    std::set<std::pair<uint32_t, int>> seen;  // A unit's words, a k-tile.
    for (int block = 0; block < kBlocks; ++block) {
      const BlockSchedule schedule = ScheduleBlock(gemm, block, kBlocks);
      EXPECT_EQ(schedule.header.units, static_cast<int>(schedule.units.size()));
      EXPECT_EQ(schedule.header.tiles, static_cast<int>(schedule.tiles.size()));
      for (const ScheduledTile& tile : schedule.tiles) {
        ASSERT_LT(tile.unit, schedule.units.size());
        EXPECT_TRUE(seen.emplace(schedule.units[tile.unit].word, tile.k_tile).second);
        ExpectPlace(gemm, schedule, tile);
      }
      ExpectWarps(schedule);
    }
    const int outputs = gemm.copies * gemm.copy_strips;
    EXPECT_EQ(seen.size(), static_cast<size_t>(outputs * gemm.k_tiles));
  }
}

TEST(PersistentPlan, EveryUnitHasItsOwnWordsAndOneSplitAddsTheBias) {
  for (const PhaseGemm& gemm : Gemms()) {
    std::set<uint32_t> words;
    std::map<std::pair<int, uint32_t>, int> biases;
    for (int block = 0; block < kBlocks; ++block) {
      for (const ScheduledUnit& unit : ScheduleBlock(gemm, block, kBlocks).units) {
        EXPECT_TRUE(words.insert(unit.word).second);
        EXPECT_EQ(unit.word % kStripOutputs, 0);
        biases[{unit.copy * 2 + unit.side, unit.output}] += static_cast<int>(unit.first_split);
      }
    }
    EXPECT_EQ(words.size(), static_cast<size_t>(gemm.splits * gemm.columns / kStripOutputs));
    EXPECT_EQ(*words.rbegin(), static_cast<uint32_t>(gemm.splits * gemm.columns - kStripOutputs));
    for (const auto& [place, count] : biases) EXPECT_EQ(count, 1);
    EXPECT_EQ(std::ssize(biases), gemm.copies * gemm.copy_strips);
  }
}

TEST(PersistentPlan, BlocksHaveAboutTheSameNumberOfTiles) {
  for (const PhaseGemm& gemm : Gemms()) {
    const int total = gemm.copies * gemm.copy_strips * gemm.k_tiles;
    if (total < 8 * kBlocks) continue;
    int most = 0;
    for (int block = 0; block < kBlocks; ++block) {
      most = std::max(most, ScheduleBlock(gemm, block, kBlocks).header.tiles);
    }
    EXPECT_LE(most, total * 1.3 / kBlocks) << gemm.n << " x " << gemm.weights.k;
  }
}

TEST(PersistentPlan, TheSharedExpertsTilesHaveTheirOwnPlaces) {
  PhaseGemm gates = Gemm(1024, 2048, 1, 9, 1, Phase::kGates);
  PhaseGemm downs = Gemm(2048, 512, 1, 1, 9, Phase::kDown);
  for (PhaseGemm* const gemm : {&gates, &downs}) {
    gemm->shared = gemm->weights;
    gemm->shared.tile_bytes = 2176;
    gemm->shared_selection = 8;
    std::set<std::pair<int, uint32_t>> seen;
    for (int block = 0; block < kBlocks; ++block) {
      const BlockSchedule schedule = ScheduleBlock(*gemm, block, kBlocks);
      for (const ScheduledTile& tile : schedule.tiles) {
        const int strip = static_cast<int>(schedule.units[tile.unit].output) / kStripOutputs;
        const bool is_shared = tile.selection == 8;
        const int of_segment = tile.k_tile % gemm->weights.tiles_of_strip;
        EXPECT_EQ(int64_t{tile.offset} * 16,
                  TileOffset(is_shared ? gemm->shared : gemm->weights, strip, of_segment));
        EXPECT_TRUE(seen.emplace(tile.selection, tile.offset).second);
      }
    }
    EXPECT_EQ(std::ranges::count_if(seen, [](const auto& tile) { return tile.first == 8; }),
              std::ssize(seen) / 9);
  }
}

/// The place of a tile of a shared expert of `parts` parts in its matrix.
int64_t SharedPlace(const PhaseGemm& gemm, int parts, const ScheduledTile& tile, int strip) {
  const int part = tile.selection - gemm.shared_selection;
  if (gemm.segments > 1) {
    const int of_part = tile.k_tile % gemm.weights.tiles_of_strip;
    return TileOffset(gemm.shared, strip, part * gemm.weights.tiles_of_strip + of_part);
  }
  const int width = gemm.sides == 2 ? gemm.strips : gemm.strips / 2;
  const int side = strip / width;
  const int of_side = part * width + strip % width;
  return TileOffset(gemm.shared, side * parts * width + of_side, tile.k_tile);
}

TEST(PersistentPlan, AWideSharedExpertIsSeveralSelections) {
  constexpr int kParts = 3;
  constexpr int kInner = 256;
  PhaseGemm two_sides = Gemm(kInner, 512, 2, 4 + kParts, 1, Phase::kGates);
  PhaseGemm one_matrix = Gemm(2 * kInner, 512, 1, 4 + kParts, 1, Phase::kGates);
  PhaseGemm downs = Gemm(512, kInner, 1, 1, 4 + kParts, Phase::kDown);
  for (PhaseGemm* const gemm : {&two_sides, &one_matrix, &downs}) {
    gemm->shared = gemm->weights;
    gemm->shared.tile_bytes = 2176;
    gemm->shared_selection = 4;
    gemm->shared_parts = kParts;
    if (gemm == &downs) {
      gemm->shared.k *= kParts;
      gemm->shared.tiles_of_strip *= kParts;
    } else {
      gemm->shared.n *= kParts;
    }
    std::set<std::pair<int, int64_t>> seen;
    for (int block = 0; block < kBlocks; ++block) {
      const BlockSchedule schedule = ScheduleBlock(*gemm, block, kBlocks);
      for (const ScheduledTile& tile : schedule.tiles) {
        if (tile.selection < gemm->first_shared()) continue;
        const ScheduledUnit& unit = schedule.units[tile.unit];
        const int64_t offset = int64_t{tile.offset} * 16;
        EXPECT_EQ(offset,
                  SharedPlace(*gemm, kParts, tile, static_cast<int>(unit.output) / kStripOutputs));
        EXPECT_LT(offset,
                  int64_t{2176} * gemm->shared.n / kStripOutputs * gemm->shared.tiles_of_strip);
        EXPECT_TRUE(seen.emplace(tile.side, offset).second);
      }
    }
    // All of both sides' matrices.
    EXPECT_EQ(std::ssize(seen),
              gemm->sides * (gemm->shared.n / kStripOutputs) * gemm->shared.tiles_of_strip);
  }
}

TEST(PersistentPlan, NoMoreUnitsThanABlockHasThreadsFor) {
  // The dense layer of GLM-4.5-Air.
  const PhaseGemm gemm = Gemm(10944, 4096, 2, 1, 1, Phase::kGates);
  EXPECT_EQ(gemm.splits, 2);
  for (int block = 0; block < kBlocks; ++block) {
    EXPECT_LE(ScheduleBlock(gemm, block, kBlocks).header.units, kMostUnits);
  }
}

TEST(PersistentPlan, MoreSplitsWhereInputsHaveToBeGathered) {
  // Without it, every block would gather and activate all 14336 inputs.
  EXPECT_EQ(Gemm(4096, 14336).splits, 1);
  EXPECT_EQ(Gemm(4096, 14336, 1, 1, 1, Phase::kDown).splits, 4);
}

PersistentArguments Shape() {
  PersistentArguments args;
  args.features = 2048;
  args.heads = 32;
  args.kv_heads = 4;
  args.key_dim = 128;
  args.value_dim = 128;
  args.pairs = 64;
  args.router.experts = 128;
  args.router.top_k = 8;
  return args;
}

PersistentLayer Layer() {
  PersistentLayer layer;
  layer.gemms[0] = Gemm(5120, 2048);
  layer.gemms[1] = Gemm(2048, 4096);
  layer.gemms[2] = Gemm(1536, 2048, 1, 8);
  layer.gemms[3] = Gemm(2048, 768, 1, 1, 8);
  return layer;
}

TEST(PersistentPlan, PartsOfMemoryDoNotOverlap) {
  std::vector<PersistentLayer> layers(2, Layer());
  const Schedules schedules = ScheduleLayers(layers, kBlocks);
  EXPECT_EQ(layers[0].gemms[3].schedule, layers[1].gemms[3].schedule);
  const auto args = LayOutPersistent(Shape(), layers, schedules, kBlocks, kSharedBytes);
  ASSERT_TRUE(args.has_value());
  EXPECT_LE(args->shared.bytes, kSharedBytes);
  EXPECT_GE(args->slots, 4);
  EXPECT_GE(args->shared.queries, args->shared.rotations + 64 * 8);
  EXPECT_LT(args->shared.fresh, args->shared.ring);
  EXPECT_LT(args->shared.sums, args->shared.ring);
  EXPECT_EQ(args->shared.keys, args->shared.ring + kLowSlots * kPersistentWarps * 2112);
  // Stages of keys and values, in rows of 16 more bytes.
  EXPECT_GE(args->shared.bytes - args->shared.keys, 8 * 16 * (272 + 272));
  const PersistentExchange& at = args->exchange;
  EXPECT_EQ(at.phases[0], 0);
  for (int phase = 0; phase < kPhases; ++phase) {
    const int end = phase + 1 < kPhases ? at.phases[phase + 1] : at.attention;
    EXPECT_GE(end - at.phases[phase], at.phase_words[phase]);
    EXPECT_EQ(at.phase_words[phase],
              layers[0].gemms[phase].splits * layers[0].gemms[phase].columns);
  }
  EXPECT_GE(at.mixed - at.attention, 4 * args->attention_splits * 8 * (128 + 4));
  EXPECT_GE(at.words - at.arrived, kBlocks);
}

/// The layer for `rows`.
PersistentLayer LayerOfRows(int rows) {
  static const PersistentExpert kExpert;
  PersistentLayer layer = Layer();
  layer.experts = &kExpert;
  SplitRows(rows, Shape().router, kBlocks, &layer);
  return layer;
}

/// The tile of a warp of the block, and its unit.
void ExpectTile(const PhaseGemm& gemm, const Schedule& header, const PhaseDeal& deal,
                const TileWalk& walk) {
  EXPECT_GE(walk.k_tile(), header.first_k_tile);
  EXPECT_LT(walk.k_tile(), header.end_k_tile);
  const ScheduledTile tile = walk.Tile();
  const ScheduledUnit unit = deal.Unit(walk.unit());
  const int segment = walk.k_tile() * gemm.segment_factor >> kSegmentBits;
  EXPECT_EQ(tile.selection, gemm.segments > 1 ? segment : unit.copy);
  EXPECT_EQ(tile.side, unit.side);
  EXPECT_EQ(int64_t{tile.offset} * 16,
            TileOffset(gemm.weights, static_cast<int>(unit.output) / kStripOutputs,
                       walk.k_tile() - segment * gemm.weights.tiles_of_strip));
}

/// Adds the units and k-tiles of the block's tiles to `seen`.
void ExpectWalks(const PhaseGemm& gemm, const PhaseDeal& deal,
                 std::set<std::pair<int, int>>* seen) {
  const Schedule header = deal.Header();
  std::map<int, std::set<int>> warps;
  for (int warp = 0; warp < kPersistentWarps; ++warp) {
    const int first = TilesBefore(warp, header.tiles);
    const int end = TilesBefore(warp + 1, header.tiles);
    if (first == end) continue;
    TileWalk walk(gemm, header, first);
    for (int tile = first; tile < end; ++tile, walk.Advance()) {
      ASSERT_LT(walk.unit(), header.units);
      EXPECT_EQ(WarpOfTile(tile, header.tiles), warp);
      warps[walk.unit()].insert(warp);
      EXPECT_TRUE(seen->emplace(header.first_unit + walk.unit(), walk.k_tile()).second);
      ExpectTile(gemm, header, deal, walk);
    }
  }
  for (int local = 0; local < header.units; ++local) {
    const ScheduledUnit unit = deal.Unit(local);
    const std::set<int>& its = warps[local];
    EXPECT_EQ(unit.end_warp - unit.first_warp, std::ssize(its));
    EXPECT_EQ(unit.first_warp, its.empty() ? 0 : *its.begin());
  }
}

TEST(PersistentPlan, RowsTilesHaveOneBlockAndOneWarp) {
  for (const auto& [rows, tasks] :
       {std::pair(2, 8), std::pair(2, 13), std::pair(5, 9), std::pair(8, 51), std::pair(8, 64)}) {
    const PersistentLayer layer = LayerOfRows(rows);
    EXPECT_EQ(layer.gemms[2].most_selected, rows * 8);
    for (const PhaseGemm& gemm : layer.gemms) {
      const bool routed = gemm.most_selected > 0;
      std::set<std::pair<int, int>> seen;
      for (int block = 0; block < kBlocks; ++block) {
        ExpectWalks(gemm, PhaseDeal(gemm, rows, routed ? tasks : 0, block, kBlocks), &seen);
      }
      const int copies = routed && gemm.segments == 1 ? tasks : gemm.copies;
      const int k_tiles = gemm.segments > 1 ? tasks * gemm.weights.tiles_of_strip : gemm.k_tiles;
      EXPECT_EQ(std::ssize(seen), copies * gemm.sides * gemm.strips * k_tiles);
    }
  }
}

TEST(PersistentPlan, RowsMultiplyTheSharedExpertOnce) {
  static const PersistentExpert kExpert;
  PersistentRouter router = Shape().router;
  router.shared = 2;
  PersistentLayer layer = Layer();
  layer.experts = &kExpert;
  layer.gemms[2] = Gemm(1536, 2048, 1, 10);
  layer.gemms[3] = Gemm(2048, 768, 1, 1, 10);
  for (const int phase : {2, 3}) {
    PhaseGemm& gemm = layer.gemms[phase];
    gemm.shared = gemm.weights;
    gemm.shared_selection = 8;
    gemm.shared_parts = 2;
    if (phase == 2) gemm.shared.n *= 2;
    if (phase == 3) gemm.shared.k *= 2;
    if (phase == 3) gemm.shared.tiles_of_strip *= 2;
  }
  SplitRows(4, router, kBlocks, &layer);
  // Rows' words have places for ten selections; 32 experts at most, then the shared one's parts.
  EXPECT_EQ(layer.gemms[2].most_selected, 34);
  EXPECT_EQ(layer.gemms[2].columns, 10 * 1536);
  constexpr int kTasks = 15;
  for (const int phase : {2, 3}) {
    const PhaseGemm& gemm = layer.gemms[phase];
    std::set<int64_t> shared;
    for (int block = 0; block < kBlocks; ++block) {
      const Schedule header = PhaseDeal(gemm, 4, kTasks, block, kBlocks).Header();
      if (header.tiles == 0) continue;
      TileWalk walk(gemm, header, 0);
      for (int tile = 0; tile < header.tiles; ++tile, walk.Advance()) {
        const ScheduledTile found = walk.Tile(kTasks - 2);
        EXPECT_EQ(found.selection, walk.selection());
        EXPECT_LT(found.selection, kTasks);
        if (found.selection >= kTasks - 2) {
          EXPECT_TRUE(shared.insert(found.offset).second);
        } else {
          EXPECT_EQ(found.offset, walk.Tile().offset);
        }
      }
    }
    EXPECT_EQ(std::ssize(shared), gemm.shared.n / kStripOutputs * gemm.shared.tiles_of_strip);
  }
}

TEST(PersistentPlan, RowsPartsOfMemoryDoNotOverlap) {
  for (const int rows : {2, 8}) {
    std::vector<PersistentLayer> layers(2, LayerOfRows(rows));
    const Schedules schedules = ScheduleLayers(layers, kBlocks, rows);
    PersistentArguments shape = Shape();
    shape.form = PersistentForm::kRows;
    shape.rows = rows;
    const auto args = LayOutPersistent(shape, layers, schedules, kBlocks, kSharedBytes);
    ASSERT_TRUE(args.has_value());
    EXPECT_LE(args->shared.bytes, kSharedBytes);
    EXPECT_GE(args->slots, 2);
    EXPECT_GE(args->shared.sums - args->shared.activations, rows * args->activation_stride);
    EXPECT_GE(args->shared.ring - args->shared.keys, 8 * 16 * (272 + 272));
    // All rows may be of one sequence.
    EXPECT_GE(args->shared.keys - args->shared.fresh, rows * (128 + 128) * 2);
    EXPECT_GE(args->shared.queries - args->shared.rotations, rows * 64 * 8);
    EXPECT_GE(args->activation_stride, schedules.span * kTileK * 2);
    EXPECT_EQ(args->exchange.phase_words[3],
              layers[0].gemms[3].splits * rows * layers[0].gemms[3].columns);
    EXPECT_LE(layers[0].gemms[3].splits, kMostRowSplits);
    EXPECT_GE(args->exchange.arrived - args->exchange.inputs[1], rows * (2048 + 64));
  }
}

TEST(PersistentPlan, LimbsAndTheirUnitsDoNotOverlap) {
  for (const int rows : {1, 2, 3}) {
    std::vector<PersistentLayer> layers(2, rows == 1 ? Layer() : LayerOfRows(rows));
    const Schedules schedules = ScheduleLayers(layers, kBlocks, rows);
    PersistentArguments shape = Shape();
    shape.kind = CodeKind::kInt4;
    shape.form = rows == 1 ? PersistentForm::kToken : PersistentForm::kRows;
    shape.rows = rows;
    const auto args = LayOutPersistent(shape, layers, schedules, kBlocks, kSharedBytes);
    ASSERT_TRUE(args.has_value());
    const PersistentShared& at = args->shared;
    EXPECT_GE(at.limb_units - at.activations, rows * args->activation_stride);
    if (rows > kMostLimbRows) {
      EXPECT_EQ(args->limb_stride, 0);
      EXPECT_GE(args->activation_stride, schedules.span * kTileK * 2);
      continue;
    }
    EXPECT_GE(args->limb_stride, schedules.span * kTileK);
    EXPECT_GE(args->activation_stride, kLimbCount * args->limb_stride);
    EXPECT_GE(at.sums - at.limb_units, schedules.span * kMostLimbRows * 4);
    // The eight columns of a matrix are in different banks, or the same.
    std::set<int> banks;
    for (int row = 0; row < rows; ++row) {
      for (int limb = 0; limb < kLimbCount; ++limb) {
        banks.insert((row * args->activation_stride + limb * args->limb_stride) / 16 % 8);
      }
    }
    EXPECT_EQ(std::ssize(banks), rows * kLimbCount);
  }
}

/// A layer with a shared expert in a model of `features`, in form kGeneral.
std::optional<PersistentArguments> LayOutShared(int features, int kv_heads, int head_dim) {
  std::vector<PersistentLayer> layers(1);
  layers[0].gemms[0] = Gemm(3 * kv_heads * head_dim, features);
  layers[0].gemms[1] = Gemm(features, kv_heads * head_dim, 1, 1, 1, Phase::kOut);
  layers[0].gemms[2] = Gemm(128, features, 2, 5, 1, Phase::kGates);
  layers[0].gemms[3] = Gemm(features, 128, 1, 1, 5, Phase::kDown);
  const Schedules schedules = ScheduleLayers(layers, kBlocks);
  PersistentArguments shape;
  shape.form = PersistentForm::kGeneral;
  shape.features = features;
  shape.heads = shape.kv_heads = kv_heads;
  shape.key_dim = shape.value_dim = head_dim;
  shape.pairs = head_dim / 2;
  shape.router = {.experts = 16, .top_k = 4, .shared = 1};
  return LayOutPersistent(shape, layers, schedules, kBlocks, kSharedBytes);
}

TEST(PersistentPlan, TeamsAreAsManyAsThereIsMemoryFor) {
  const auto teams = [](int features, int head_dim) {
    const auto args = LayOutShared(features, 16, head_dim);
    if (!args.has_value()) return 0;
    const int count = kPersistentWarps >> args->team_warps_log2;
    EXPECT_LE(args->shared.keys + count * 16 * 2 * (2 * head_dim + 16), args->shared.bytes);
    EXPECT_LE(args->shared.bytes, kSharedBytes);
    EXPECT_GE(args->slots, kLowSlots);
    return count;
  };
  EXPECT_EQ(teams(2048, 128), 8);
  EXPECT_EQ(teams(5120, 128), 4);
  EXPECT_EQ(teams(7168, 128), 2);
  EXPECT_EQ(teams(8192, 128), 0);
  EXPECT_EQ(teams(7168, 96), 0) << "features that teams of eight warps do not share evenly";
}

/// The form that lays out a model of experts with `features`, the other sizes as Qwen3-235B-A22B's.
PersistentForm FormOfExperts(int features) {
  std::vector<PersistentLayer> layers(1);
  layers[0].gemms[0] = Gemm(9216, features);
  layers[0].gemms[1] = Gemm(features, 8192, 1, 1, 1, Phase::kOut);
  layers[0].gemms[2] = Gemm(1536, features, 2, 8, 1, Phase::kGates);
  layers[0].gemms[3] = Gemm(features, 1536, 1, 1, 8, Phase::kDown);
  const Schedules schedules = ScheduleLayers(layers, kBlocks);
  PersistentArguments shape = Shape();
  shape.features = features;
  shape.heads = 64;
  shape.router = {.experts = 128, .top_k = 8};
  const auto args = LayOutPersistent(shape, layers, schedules, kBlocks, kSharedBytes);
  EXPECT_TRUE(args.has_value());
  return args.has_value() ? args->form : PersistentForm::kRows;
}

TEST(PersistentPlan, PlainModelsTakeTheGeneralFormWhereMemoryIsShort) {
  EXPECT_EQ(FormOfExperts(2048), PersistentForm::kToken);
  EXPECT_EQ(FormOfExperts(4096), PersistentForm::kGeneral);
}

/// Whether the bytes of `values`, of which there may be none, begin at `data`.
template <typename T>
bool HasBytesOf(const uint8_t* data, const std::vector<T>& values) {
  return values.empty() || std::memcmp(data, values.data(), values.size() * sizeof(T)) == 0;
}

TEST(PersistentPlan, SchedulesHaveTheBlocksParts) {
  std::vector<PersistentLayer> layers(1, Layer());
  const Schedules schedules = ScheduleLayers(layers, kBlocks);
  ASSERT_EQ(schedules.data.size(), static_cast<size_t>(schedules.bytes) * kBlocks);
  for (const int block : {0, 77, kBlocks - 1}) {
    for (const PhaseGemm& gemm : layers[0].gemms) {
      const uint8_t* const from =
          schedules.data.data() + int64_t{block} * schedules.bytes + gemm.schedule;
      const BlockSchedule wanted = ScheduleBlock(gemm, block, kBlocks);
      Schedule header;
      std::memcpy(&header, from, sizeof(header));
      EXPECT_EQ(header.tiles, wanted.header.tiles);
      EXPECT_EQ(header.units, wanted.header.units);
      EXPECT_TRUE(HasBytesOf(from + sizeof(header), wanted.units));
      EXPECT_TRUE(HasBytesOf(from + header.tiles_at, wanted.tiles));
    }
  }
}

PersistentArguments HybridShape() {
  PersistentArguments args;
  args.features = 2048;
  args.router = {.experts = 256, .top_k = 8, .shared = 1, .shared_gated = 1};
  args.delta = {.key_heads = 16,
                .value_heads = 32,
                .key_dim = 128,
                .value_dim = 128,
                .value_log2 = 7,
                .slices = 4,
                .group = 2};
  return args;
}

/// Layers of Qwen3.6-35B-A3B: a gated delta net, and the projections of attention.
std::vector<PersistentLayer> HybridLayers() {
  std::vector<PersistentLayer> layers(2);
  layers[0].gemms[0] = Gemm(12288, 2048);
  layers[0].gemms[1] = Gemm(2048, 4096);
  layers[0].gemms[2] = Gemm(1024, 2048, 1, 9);
  layers[0].gemms[3] = Gemm(2048, 512, 1, 1, 9);
  layers[0].gemms[3].shared.tile_bytes = 2176;
  layers[1].gemms[0] = Gemm(9216, 2048);
  return layers;
}

TEST(PersistentPlan, StatesHaveTheMemoryOfUpperSlots) {
  std::vector<PersistentLayer> layers = HybridLayers();
  const Schedules schedules = ScheduleLayers(layers, kBlocks);
  const auto args = LayOutPersistent(HybridShape(), layers, schedules, kBlocks, kSharedBytes);
  ASSERT_TRUE(args.has_value());
  EXPECT_EQ(args->slot_bytes, 2176);
  EXPECT_GE(args->slots, 3);
  const PersistentShared& at = args->shared;
  EXPECT_GE(at.kept - at.delta_rows, 2 * 2048 * 4);
  EXPECT_GE(at.activations - at.kept, 3 * (128 + 128 + 32) * 4);
  EXPECT_GE(at.ring - at.inputs, static_cast<int>(sizeof(DeltaInputs)));
  EXPECT_EQ(at.state, at.ring + kLowSlots * kPersistentWarps * 2176);
  EXPECT_EQ(at.window - at.state, 128 * kDeltaRowFloats * 4);
  EXPECT_EQ(at.conv - at.window, 3 * (128 + 128 + 32) * 4);
  EXPECT_LE(at.conv + (128 + 128 + 32) * 16, at.bytes);
  EXPECT_LE(at.bytes, kSharedBytes);
  EXPECT_GE(args->exchange.squares - args->exchange.mixed, 32 * 128);
  EXPECT_GE(args->exchange.logits - args->exchange.squares, 32 * 4);
  EXPECT_GE(args->exchange.arrived - args->exchange.logits, 257);
}

TEST(PersistentPlan, MoreStatesThanBlocksAreNotLaidOut) {
  std::vector<PersistentLayer> layers = HybridLayers();
  const Schedules schedules = ScheduleLayers(layers, kBlocks);
  PersistentArguments shape = HybridShape();
  shape.delta.value_heads = 34;
  EXPECT_FALSE(LayOutPersistent(shape, layers, schedules, kBlocks, kSharedBytes).has_value());
}

/// A run of Moonlight: after attention, and the projections before the next one; or of a model of
/// 5,120 features whose queries have a low rank.
std::vector<PersistentLayer> LayersBetween(bool of_rank) {
  static const float kNorm = 1;
  const int features = of_rank ? 5120 : 2048;
  const int inner = of_rank ? 1536 : 1408;
  std::vector<PersistentLayer> layers(2);
  layers[0].gemms[1] = Gemm(features, of_rank ? 16384 : 2048, 1, 1, 1, Phase::kOut);
  layers[0].gemms[2] = Gemm(inner, features, 2, 8, 1, Phase::kGates);
  layers[0].gemms[3] = Gemm(features, inner, 1, 1, 8, Phase::kDown);
  layers[0].mlp_norm = &kNorm;
  layers[1].attention_norm = &kNorm;
  layers[1].gemms[0] = of_rank ? Pair(1536, 576, features) : Pair(3072, 576, features);
  if (of_rank) layers[1].gemms[1] = Gemm(24576, 1536);
  return layers;
}
std::optional<PersistentArguments> LayOutBetween(std::vector<PersistentLayer> layers, int features,
                                                 int shared_bytes = kSharedBytes) {
  const Schedules schedules = ScheduleLayers(layers, kBlocks);
  PersistentArguments shape;
  shape.form = PersistentForm::kBetween;
  shape.features = features;
  shape.router = {.experts = 160, .top_k = 6, .shared = 2};
  return LayOutPersistent(shape, layers, schedules, kBlocks, shared_bytes);
}

TEST(PersistentPlan, RunsBetweenAttentionsHaveTheirPhases) {
  std::vector<PersistentLayer> layers = LayersBetween(false);
  auto args = LayOutBetween(layers, 2048);
  ASSERT_TRUE(args.has_value());
  EXPECT_EQ(args->layer_count, 2);
  EXPECT_EQ(args->first_phase, 1);
  EXPECT_EQ(args->end_phase, 5) << "after the projections";
  layers.pop_back();
  args = LayOutBetween(layers, 2048);
  ASSERT_TRUE(args.has_value());
  EXPECT_EQ(args->first_phase, 1);
  EXPECT_EQ(args->end_phase, 4) << "after the experts";
  args = LayOutBetween(LayersBetween(true), 5120);
  ASSERT_TRUE(args.has_value());
  EXPECT_EQ(args->end_phase, 6) << "after queries' second projection";
  EXPECT_GE(args->exchange.phase_words[1], 24576);
}

TEST(PersistentPlan, RingsHaveTheRestOfTheMemoryBetweenAttentions) {
  const auto args = LayOutBetween(LayersBetween(false), 2048);
  ASSERT_TRUE(args.has_value());
  const PersistentShared& at = args->shared;
  EXPECT_GE(at.router - at.norms, 2 * 2048 * 4);
  EXPECT_GE(at.sums - at.activations, 16 * kTileK * 2);
  EXPECT_GE(at.ring - at.sums, 8 * kPersistentWarps * kStripOutputs * 4);
  EXPECT_EQ(at.bytes, at.ring + args->slots * kPersistentWarps * 2112);
  EXPECT_LE(at.bytes, kSharedBytes);
  EXPECT_GE(args->slots, 3);
  EXPECT_EQ(args->exchange.mixed, args->exchange.attention) << "no words for attention";
  EXPECT_FALSE(LayOutBetween(LayersBetween(false), 2048, 120000).has_value());
}

TEST(PersistentPlan, LayersThatWriteTheSameWordsShareThem) {
  const auto key = [](const std::vector<PersistentLayer>& layers) {
    const auto args = LayOutBetween(layers, 2048);
    EXPECT_TRUE(args.has_value());
    return args.has_value() ? ExchangeKey(*args, layers) : std::vector<int>();
  };
  std::vector<PersistentLayer> layers = LayersBetween(false);
  const std::vector<int> usual = key(layers);
  EXPECT_FALSE(usual.empty());
  const float norm = 1;
  layers[0].mlp_norm = &norm;
  EXPECT_EQ(key(layers), usual) << "other weights of the same sizes";
  layers[1].gemms[0] = Pair(3072, 608, 2048);
  EXPECT_NE(key(layers), usual) << "other latents";
  layers.pop_back();
  EXPECT_NE(key(layers), usual) << "no projections";
  std::vector<PersistentLayer> plain(2, Layer());
  const Schedules schedules = ScheduleLayers(plain, kBlocks);
  const auto args = LayOutPersistent(Shape(), plain, schedules, kBlocks, kSharedBytes);
  ASSERT_TRUE(args.has_value());
  EXPECT_TRUE(ExchangeKey(*args, plain).empty()) << "all layers in one run";
}

bool Fits(const PersistentArguments& shape, std::vector<PersistentLayer> layers,
          int shared_bytes = kSharedBytes) {
  const Schedules schedules = ScheduleLayers(layers, kBlocks);
  return LayOutPersistent(shape, layers, schedules, kBlocks, shared_bytes).has_value();
}

TEST(PersistentPlan, WhatDoesNotFitIsNotLaidOut) {
  std::vector<PersistentLayer> layers(1, Layer());
  PersistentArguments shape = Shape();
  EXPECT_TRUE(Fits(shape, layers));
  EXPECT_FALSE(Fits(shape, layers, 150000));
  shape.router.experts = kBlocks * kMostRouterRows + 1;
  EXPECT_FALSE(Fits(shape, layers));
  layers[0].gemms[2] = Gemm(kStripOutputs * kBlocks * (kMostUnits + 1), 128);
  EXPECT_FALSE(Fits(Shape(), layers));
}

}  // namespace
}  // namespace marlin::cuda::persistent_plan_test
