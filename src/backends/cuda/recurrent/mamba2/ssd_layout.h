// Parts of chunks that the kernels of Mamba-2 in chunks pass on in the workspace.
#pragma once

#include "backends/cuda/recurrent/chunked/chunk_layout.h"
#include "backends/cuda/recurrent/mamba2/mamba2_layout.h"

namespace marlin::cuda {

/// The parts of chunks in the workspace, in floats. Every part is aligned to 16 bytes.
struct SsdLayout {
  int groups;
  int heads;
  int key_dim;
  int value_dim;

  /// Rows of keys and queries.
  MARLIN_HOST_DEVICE int KeyRow() const { return key_dim + kFragmentPadding; }
  MARLIN_HOST_DEVICE int KeyFloats() const { return kChunkRows * KeyRow(); }
  /// Floats of a chunk's group: keys, queries, and Q K^T [kChunkRows][ChunkLayout::kSquareRow].
  MARLIN_HOST_DEVICE int64_t PairFloats() const {
    return 2 * KeyFloats() + ChunkLayout::kSquareFloats;
  }
  /// Floats of a chunk's head: ChunkRows, then values times their steps
  /// [value_dim / kScanColumns][kChunkRows][kScanColumns].
  MARLIN_HOST_DEVICE int64_t HeadFloats() const {
    return ChunkLayout::kRowsFloats + int64_t{kChunkRows} * value_dim;
  }
  MARLIN_HOST_DEVICE int64_t ChunkFloats() const {
    return groups * PairFloats() + heads * HeadFloats();
  }
  MARLIN_HOST_DEVICE int64_t PairAt(int64_t chunk, int group) const {
    return chunk * ChunkFloats() + group * PairFloats();
  }
  MARLIN_HOST_DEVICE int64_t HeadAt(int64_t chunk, int head) const {
    return chunk * ChunkFloats() + groups * PairFloats() + head * HeadFloats();
  }
};

/// A turn of Mamba-2 in chunks.
struct SsdArguments {
  Mamba2Arguments mamba;
  float* parts = nullptr;  ///< SsdLayout.
  int first = 0;           ///< The first of the call's chunks that the turn takes.
  int count = 0;           ///< The chunks of the turn, at most.

  MARLIN_HOST_DEVICE SsdLayout Layout() const {
    return {mamba.key_heads, mamba.value_heads, mamba.key_dim, mamba.value_dim};
  }
};

}  // namespace marlin::cuda
