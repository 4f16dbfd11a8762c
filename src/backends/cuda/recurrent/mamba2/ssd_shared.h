// The shared memory of the kernels of Mamba-2 in chunks.
#pragma once

#include "backends/cuda/recurrent/mamba2/ssd_layout.h"

namespace marlin::cuda {

/// Heads of a CTA of the local kernel: a warp sums the decays of one.
inline constexpr int kLocalHeads = 8;

/// A CTA of the local kernel: the rows of a chunk, and their steps in its heads. Keys and queries
/// follow where they fit.
struct SsdLocalRows {
  ChunkSources chunk;
  float steps[kLocalHeads][kChunkRows];
};
static_assert(sizeof(SsdLocalRows) % 16 == 0);

/// Bytes of that with keys and queries.
inline int SsdLocalBytes(const SsdLayout& layout) {
  return static_cast<int>(sizeof(SsdLocalRows)) + 2 * layout.KeyFloats() * 4;
}

/// A CTA of the scan, in floats. kCopies: it copies keys and queries; otherwise it reads them in
/// the workspace, for devices where they do not fit.
template <int kKeyDim, bool kCopies>
struct SsdScanShared {
  static constexpr int kKeyRow = kKeyDim + kFragmentPadding;
  static constexpr int kKeyFloats = kChunkRows * kKeyRow;
  /// Keys and queries, if they are copied, and their products.
  static constexpr int kProducts = kCopies ? 2 * kKeyFloats : 0;
  static constexpr int kPairFloats = kProducts + ChunkLayout::kSquareFloats;
  /// Chunks whose pairs fit.
  static constexpr int kPairs = kKeyDim > 128 ? 1 : 2;
  static constexpr int kRows = kPairs * kPairFloats;
  static constexpr int kValues = kRows + ChunkLayout::kRowsFloats;
  static constexpr int kState = kValues + ChunkLayout::kValueFloats;
  static constexpr int kNews = kState + kKeyDim * kScanRow;      ///< Values, decayed to the end.
  static constexpr int kDeltas = kNews + kChunkRows * kScanRow;  ///< Values.
  static constexpr int kBarriers = kDeltas + kChunkRows * kScanRow;
  static constexpr int kBytes = kBarriers * 4 + 3 * 8;
};

}  // namespace marlin::cuda
