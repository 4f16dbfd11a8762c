// The kernels of decode attention: the warps of a CTA and its shared memory.
#pragma once

#include "backends/cuda/attention/attention_layout.h"
#include "backends/cuda/attention/rows_layout.h"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

inline constexpr int kDecodeWarps = 4;
inline constexpr int kDecodeStages = 2;
inline constexpr int kSumPadding =
    8;  ///< In floats, against bank conflicts in stores of fragments.

/// The warps of a CTA. kSlices: warps with the same keys, each of which has a slice of the values.
template <int kSlices>
struct DecodeTeams {
  static constexpr int kTeams = kDecodeWarps / kSlices;
  static constexpr int kBlockKeys = kWarpKeys * kTeams;
  static_assert(kCachePageTokens % kBlockKeys == 0);  // A block is in one page.
};

/// The shared memory of a CTA: rings of keys and values with the teams' widened ones, which the
/// teams' sums replace, and the queries.
template <int kSlices>
struct DecodeLayout : CachedRows {
  using CachedRows::CachedRows;
  static constexpr int kTeams = DecodeTeams<kSlices>::kTeams;

  MARLIN_HOST_DEVICE constexpr int StageBytes() const {
    return kWarpKeys * (copied_key_row + copied_value_row);
  }
  MARLIN_HOST_DEVICE constexpr int TeamBytes() const {
    return kDecodeStages * StageBytes() + (widens ? kWarpKeys * (key_row + value_row) : 0);
  }
  MARLIN_HOST_DEVICE constexpr int RingBytes() const { return kTeams * TeamBytes(); }
  /// Sums of the teams: [kTeams][kDecodeHeads] maxima, as many sums of weights, weighted values.
  static MARLIN_HOST_DEVICE constexpr int SumsBytes(int value_dim) {
    return kTeams * kDecodeHeads * (2 + value_dim + kSumPadding) * 4;
  }
  MARLIN_HOST_DEVICE constexpr int QueriesAt(int value_dim) const {
    const int sums = SumsBytes(value_dim);
    return ((RingBytes() > sums ? RingBytes() : sums) + 15) / 16 * 16;
  }
  MARLIN_HOST_DEVICE constexpr int BarriersAt(int value_dim) const {
    return QueriesAt(value_dim) + 2 * kDecodeHeads * key_row;
  }
  MARLIN_HOST_DEVICE constexpr int Bytes(int value_dim) const {
    return BarriersAt(value_dim) + kTeams * kDecodeStages * kBarrierBytes;
  }
};

/// A kernel. tiles: tiles of 16 value features of a warp, at most.
struct DecodeShape {
  int tiles = 0;
  int slices = 1;

  constexpr bool operator==(const DecodeShape&) const = default;
  constexpr int Bytes(int key_dim, int value_dim, bool fp8) const {
    if (slices == 1) return DecodeLayout<1>(key_dim, value_dim, fp8).Bytes(value_dim);
    if (slices == 2) return DecodeLayout<2>(key_dim, value_dim, fp8).Bytes(value_dim);
    return DecodeLayout<4>(key_dim, value_dim, fp8).Bytes(value_dim);
  }
};

/// In the order in which a call takes them: the first that has its features and fits. Wide heads
/// have fewer keys in flight where shared memory is small.
inline constexpr DecodeShape kDecodeShapes[] = {{4, 1}, {8, 1}, {16, 1}, {8, 2}, {16, 2}, {8, 4}};

/// The kernel for heads of these features. Precondition: up to kMostMatrixFeatures, in
/// `shared_bytes` of every device.
constexpr DecodeShape DecodeShapeFor(int key_dim, int value_dim, bool fp8, int shared_bytes) {
  for (const DecodeShape& shape : kDecodeShapes) {
    const bool wide = shape.tiles * shape.slices * 16 > kMostTileFeatures;
    if (value_dim > shape.tiles * shape.slices * 16) continue;
    if (!wide && key_dim > kMostTileFeatures) continue;
    if (shape.Bytes(key_dim, value_dim, fp8) <= shared_bytes) return shape;
  }
  return kDecodeShapes[5];
}

}  // namespace marlin::cuda
