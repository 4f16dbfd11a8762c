// Parts of chunks that the kernels of the chunked gated delta rule pass on in the workspace: chunks
// of 64 rows of a sequence.
#pragma once

#include <cstdint>

#include "backends/cuda/recurrent/recurrent_layout.h"

namespace marlin::cuda {

inline constexpr int kChunkRows = 64;
/// Value features of a CTA of the scan.
inline constexpr int kScanColumns = 32;
/// Sequences with at most this many rows run row by row.
inline constexpr int kMostRecurrentRows = 16;
/// Chunks whose parts are in the workspace at a time: longer calls run in turns.
inline constexpr int64_t kTurnChunks = 32;
/// Padding of the rows of matrices, in floats, against bank conflicts in loads of fragments.
inline constexpr int kFragmentPadding = 4;
inline constexpr int kScanRow = kScanColumns + 8;  ///< Floats between rows of B operands.

/// The decays of a chunk's rows and where its rows are.
struct ChunkRows {
  float decays[kChunkRows];  ///< The logarithm of the decay from the chunk's begin through a row.
  int rows[kChunkRows];      ///< Rows of the call; -1: none.
};

/// The rows of a chunk that take part.
struct ChunkSources {
  int sources[kMostConvWidth - 1 + kChunkRows];  ///< As ConvolveInput takes them.
  int count;
};

/// The parts of chunks in the workspace, in floats. Every part is aligned to 16 bytes.
struct ChunkLayout {
  int key_heads;
  int value_heads;
  int key_dim;
  int value_dim;

  /// Normed keys or queries of a chunk.
  MARLIN_HOST_DEVICE int KeyRow() const { return key_dim + kFragmentPadding; }
  MARLIN_HOST_DEVICE int KeyFloats() const { return kChunkRows * KeyRow(); }
  static constexpr int kSquareRow = kChunkRows + kFragmentPadding;
  static constexpr int kSquareFloats = kChunkRows * kSquareRow;
  static constexpr int kValueFloats = kChunkRows * kScanColumns;
  static constexpr int kRowsFloats = sizeof(ChunkRows) / sizeof(float);

  /// Floats of a chunk's key head: keys, queries.
  MARLIN_HOST_DEVICE int64_t PairFloats() const { return 2 * KeyFloats(); }
  /// Floats of a chunk's value head: the transform and the scores [kChunkRows][kSquareRow], then
  /// ChunkRows, then values [value_dim / kScanColumns][kChunkRows][kScanColumns].
  MARLIN_HOST_DEVICE int64_t HeadFloats() const {
    return 2 * kSquareFloats + kRowsFloats + int64_t{kChunkRows} * value_dim;
  }
  MARLIN_HOST_DEVICE int64_t ChunkFloats() const {
    return key_heads * PairFloats() + value_heads * HeadFloats();
  }
  MARLIN_HOST_DEVICE int64_t KeysAt(int64_t chunk, int key_head) const {
    return chunk * ChunkFloats() + key_head * PairFloats();
  }
  MARLIN_HOST_DEVICE int64_t HeadAt(int64_t chunk, int value_head) const {
    return chunk * ChunkFloats() + key_heads * PairFloats() + value_head * HeadFloats();
  }
};

/// A turn of the chunked gated delta rule.
struct ChunkArguments {
  GatedDeltaArguments delta;
  float* parts = nullptr;  ///< ChunkLayout.
  int first = 0;           ///< The first of the call's chunks that the turn takes.
  int count = 0;           ///< The chunks of the turn, at most.

  MARLIN_HOST_DEVICE ChunkLayout Layout() const {
    return {delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim};
  }
};

}  // namespace marlin::cuda
