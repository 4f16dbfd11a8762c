// The layout of prepared 2:4 weights: tiles of 32 outputs x 128 k as in tile_layout.h, with the
// kept codes in fragment order and the metadata in the order of sparse MMAs.
//
//   tile  = [16 outputs: 2] fragment blocks, metadata, then the parameters of tile_layout.h
//   block = 32 lanes x 32 kept codes, packed by EncodeWords; lane 4 g + t holds, for step j of 32
//   k,
//           the 8 codes of one m16n8k32 sparse A fragment:
//             pair p = both kept codes of output g + 8 (p & 1), block of four 8 j + t + 4 (p >> 1)
//   metadata = 32 lanes x one word for each step of 32 k. Lane 4 g + t holds the nibbles of outputs
//           16 (t >> 1) + g (low half) and 8 more (high half), k = 32 j + 16 (t & 1) + 0..15,
//           lowest nibble first: sparsity selector 0 takes the words of lanes t = 0 and 1, selector
//           1 the words of t = 2 and 3, so that one word serves the MMAs of both 16 outputs.
//
// A nibble is pos1 << 2 | pos0 in the canonical layout and in the MMA. k counts dense codes
// everywhere. Padding has code 0, scale 0 and the nibble of positions 0 and 1.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

inline constexpr int kSparseStepK = 32;  ///< k of one sparse MMA.
inline constexpr int kStepsOfTile = kTileK / kSparseStepK;
inline constexpr int kBlocksOfTile = kTileK / 4;  ///< Blocks of four codes, two of which are kept.
inline constexpr int kSparseBits = 4;             ///< Code bits of the formats with sparse tiles.
inline constexpr int kMetadataOffset = 2 * BlockBytes(kSparseBits);
inline constexpr int kSparseTileBytes = kMetadataOffset + 32 * kStepsOfTile * 4;
inline constexpr uint32_t kPaddingNibble = 4;

/// Bytes of a tile before its parameters: its codes, and the metadata of sparse ones.
MARLIN_HOST_DEVICE constexpr int TileCodeBytes(TileKind kind) {
  return kind.sparse ? kSparseTileBytes : TileCodeBytes(CodeBits(kind.codes));
}

/// Sparse tiles for kernels that expand them in registers.
struct SparseTileView : TileView {
  uint32_t zero_code = 0;  ///< The code of value 0.
};

/// A kept code: its output within 16, its block within the tile, and which of the block's two.
struct KeptPlace {
  int output;
  int block;
  int which;
};
/// The place of code `i` of a lane's 32 in a fragment block, in the order of EncodeWords.
MARLIN_HOST_DEVICE constexpr KeptPlace KeptPlaceOf(int lane, int i) {
  const int pair = i % 8 / 2;
  return {lane / 4 + 8 * (pair & 1), i / 8 * 8 + lane % 4 + 4 * (pair >> 1), i % 2};
}

/// A nibble: its output within 32, and its block within the tile.
struct NibblePlace {
  int output;
  int block;
};
/// The place of nibble `i` of a lane's metadata word for step `step`.
MARLIN_HOST_DEVICE constexpr NibblePlace NibblePlaceOf(int lane, int step, int i) {
  const int t = lane % 4;
  return {16 * (t >> 1) + lane / 4 + 8 * (i / 4), step * 8 + 4 * (t & 1) + i % 4};
}

}  // namespace marlin::cuda
