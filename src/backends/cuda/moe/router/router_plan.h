// Plans of the router's product: the shapes that it supports, and its shared memory.
#pragma once

#include <cstdint>
#include <optional>

#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// Parts of k, summed apart from each other and then added in order: one for each CTA of a cluster
/// in decode, and as many in prefill, so that a row has the same bits there.
inline constexpr int kRouterParts = 8;
/// Tokens of a cluster: an n8 tile.
inline constexpr int kRouterN8 = 8;
/// The most tokens that a cluster multiplies and routes; for more, logits go through memory.
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

/// Offsets are in bytes of shared memory.
struct RouterPlan {
  int k_tiles = 0;
  int tiles_of_part = 0;  ///< The last parts may have fewer, or none.
  int strips = 0;         ///< n-tiles of experts.
  int sum_stride = 0;     ///< Floats from a token's sums to the next one's.
  int slots = 0;          ///< Decode: k-tiles of weights that fit.
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
/// more than a team routes, rows that are not whole quads, or parts that do not fit `shared_bytes`.
std::optional<RouterPlan> PlanRouter(const RouterShape& shape, int shared_bytes);

}  // namespace marlin::cuda
