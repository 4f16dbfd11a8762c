// Plans of the router's product: the shapes that it supports, and its shared memory.
#pragma once

#include <cstdint>
#include <optional>

#include "backends/cuda/layout/tile_layout.h"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

/// Parts of k, summed apart from each other and then added in order: one for each CTA of a cluster
/// or warp of a CTA in decode, and as many in prefill, so that a row has the same bits there.
inline constexpr int kRouterParts = 8;
/// Tokens of a cluster, or of a CTA of the router GEMV: an n8 tile.
inline constexpr int kRouterN8 = 8;
/// The most tokens of decode: more are a GEMM's.
inline constexpr int kMostDecodeRows = 64;
/// The most experts that a CTA routes with all of its threads: with more, all comparisons take
/// longer than a chain of reductions.
inline constexpr int kMostTeamExperts = 512;

inline constexpr int kDenseTileBytes = TileCodeBytes(16);
/// Words of the three bf16 terms of eight rows and 16 k, in fragment order; padded by eight against
/// bank conflicts.
inline constexpr int kTermWords = 3 * 64;
inline constexpr int kStepWords = kTermWords + 8;
/// Bytes of the terms of eight rows of a k-tile.
inline constexpr int kFragmentBytes = kTileK / 16 * kStepWords * 4;

struct RouterShape {
  int hidden = 0;
  int experts = 0;
};

/// A product, and the shared memory of clusters that multiply and route. Offsets are in bytes.
struct RouterPlan {
  int k_tiles = 0;
  int tiles_of_part = 0;  ///< The last parts may have fewer, or none.
  int strips = 0;         ///< n-tiles of experts.
  int sum_stride = 0;     ///< Floats from a token's sums to the next one's.
  /// Decode in clusters: k-tiles of weights that fit; 0: logits go through memory.
  int slots = 0;
  int fragments = 0;
  int own_sums = 0;   ///< f32 [8 tokens][sum_stride]
  int part_sums = 0;  ///< f32 [parts][sum_stride]
  int logits = 0;     ///< f32 [experts]
  int ids = 0;        ///< i32 [experts]
  int scores = 0;     ///< f64 [2][experts]
  int exchange = 0;   ///< f64, one for every warp.
  int barriers = 0;   ///< One for every slot, and one for the sums of other CTAs.
  int total_bytes = 0;
};

/// The plan of a shape with bf16 tiles; nothing for a shape that is not supported: no experts,
/// more than a team routes, or rows that are not whole quads.
std::optional<RouterPlan> PlanRouter(const RouterShape& shape, const DeviceShape& device);

/// CTAs of the router GEMM. The wider ones, of longer prompts, read the weights half as often.
struct RouterGemmPlan {
  static constexpr int kFewN8Tiles = 2;
  static constexpr int kMostN8Tiles = 4;
  static constexpr int kFewStages = 2;
  static constexpr int kMostStages = 4;

  int n8_tiles = kFewN8Tiles;
  int stages = kFewStages;  ///< A stage is a k-tile of the weights of 128 experts.
};
constexpr int RouterGemmBytes(const RouterGemmPlan& plan) {
  return plan.stages * (kStripsOfBlock * kDenseTileBytes + kBarrierBytes) +
         2 * plan.n8_tiles * kFragmentBytes;
}
/// Precondition: tokens > 0.
RouterGemmPlan PlanRouterGemm(int tokens, const RouterPlan& plan, const DeviceShape& device);

/// Bytes of an expert's scores, in shared memory.
inline constexpr int64_t kScoreBytes = 2 * sizeof(double);
/// The most experts whose scores fit in shared memory.
int64_t MostRouterExperts(const DeviceShape& device);

}  // namespace marlin::cuda
