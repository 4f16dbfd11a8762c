// The kernels of latent attention: the tile of a CTA and its shared memory.
#pragma once

#include "backends/cuda/attention/attention_layout.h"
#include "backends/cuda/attention/rows_layout.h"

namespace marlin::cuda {

inline constexpr int kLatentWarps = 8;
inline constexpr int kLatentStages = 2;
/// Keys of a block, and of a block where those do not fit.
inline constexpr int kLatentKeys = kCachePageTokens;
inline constexpr int kFewLatentKeys = 32;

/// The shared memory of a CTA of kGroups * 16 rows and blocks of kKeys keys.
template <int kGroups, int kKeys, bool kFp8>
struct LatentLayout {
  static constexpr int kRows = kGroups * 16;
  static constexpr int kParts =
      kLatentWarps / kGroups;                  ///< Parts of the features: warps that share 16 rows.
  static constexpr int kScoreRow = kKeys + 8;  ///< Floats; the gap avoids bank conflicts.
  static constexpr int kWeightRowBytes = kKeys * 2;

  int key_dim;
  int units;  ///< Units of a row: its features, then zeros.
  int row_bytes;

  MARLIN_HOST_DEVICE constexpr explicit LatentLayout(int features)
      : key_dim(features),
        units(SwizzledRowBytes(features) / 16),
        row_bytes(SwizzledRowBytes(features)) {}

  MARLIN_HOST_DEVICE constexpr int BlockBytes() const { return kKeys * row_bytes; }
  MARLIN_HOST_DEVICE constexpr int CodeBytes() const { return kKeys * key_dim; }
  /// The keys come first. Stages of codes follow the widened block.
  MARLIN_HOST_DEVICE constexpr int CodesAt() const { return BlockBytes(); }
  MARLIN_HOST_DEVICE constexpr int WeightsAt() const {
    return kFp8 ? CodesAt() + kLatentStages * CodeBytes() : kLatentStages * BlockBytes();
  }
  /// [kParts][kRows] rows of kScoreRow: the parts of the scores.
  MARLIN_HOST_DEVICE constexpr int ScoresAt() const {
    return WeightsAt() + 2 * kRows * kWeightRowBytes;
  }
  MARLIN_HOST_DEVICE constexpr int StateAt() const {
    return ScoresAt() + kParts * kRows * kScoreRow * int{sizeof(float)};
  }
  MARLIN_HOST_DEVICE constexpr int Bytes() const {
    return StateAt() + 2 * kRows * int{sizeof(float)};
  }
};

template <int kGroups, int kKeys>
constexpr int LatentBytesOf(int key_dim, bool fp8) {
  return fp8 ? LatentLayout<kGroups, kKeys, true>(key_dim).Bytes()
             : LatentLayout<kGroups, kKeys, false>(key_dim).Bytes();
}
constexpr int LatentBytes(int tile_rows, int keys, int key_dim, bool fp8) {
  if (keys == kLatentKeys) {
    return tile_rows == 16 ? LatentBytesOf<1, kLatentKeys>(key_dim, fp8)
                           : LatentBytesOf<2, kLatentKeys>(key_dim, fp8);
  }
  return tile_rows == 16 ? LatentBytesOf<1, kFewLatentKeys>(key_dim, fp8)
                         : LatentBytesOf<2, kFewLatentKeys>(key_dim, fp8);
}

/// The keys of a block.
constexpr int LatentKeysFor(int tile_rows, int key_dim, bool fp8, int shared_bytes) {
  return LatentBytes(tile_rows, kLatentKeys, key_dim, fp8) <= shared_bytes ? kLatentKeys
                                                                           : kFewLatentKeys;
}

}  // namespace marlin::cuda
