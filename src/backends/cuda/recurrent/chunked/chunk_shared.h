// The shared memory of the kernels of the chunked gated delta rule.
#pragma once

#include "backends/cuda/recurrent/chunked/chunk_layout.h"

namespace marlin::cuda {

/// Threads of a CTA of the local kernel.
inline constexpr int kLocalThreads = 256;
/// Value heads whose inverses are computed at a time, at most: a thread has a column.
inline constexpr int kHeadsAtOnce = kLocalThreads / kChunkRows;

/// The rows of a chunk, and their decays and writes in several value heads.
struct DeltaLocalRows {
  ChunkSources sources;
  float decays[kHeadsAtOnce][kChunkRows];
  float writes[kHeadsAtOnce][kChunkRows];
};

/// A CTA of the local kernel, in floats: keys and queries, which k . k, q . k and A of several
/// value heads replace, then DeltaLocalRows. All of it is dynamic, as the recurrent kernel's.
struct DeltaLocalShared {
  int key_floats;

  MARLIN_HOST_DEVICE int Queries() const { return key_floats; }
  static constexpr int Products() { return 0; }
  static constexpr int Matrices() { return 2 * ChunkLayout::kSquareFloats; }
  /// Value heads whose A there are at a time.
  MARLIN_HOST_DEVICE int Heads() const {
    const int heads = 2 * key_floats / ChunkLayout::kSquareFloats;
    return heads < kHeadsAtOnce ? heads : kHeadsAtOnce;
  }
  MARLIN_HOST_DEVICE int Rows() const {
    const int squares = Matrices() + Heads() * ChunkLayout::kSquareFloats;
    return squares > 2 * key_floats ? squares : 2 * key_floats;
  }
  MARLIN_HOST_DEVICE int Bytes() const {
    return Rows() * 4 + static_cast<int>(sizeof(DeltaLocalRows));
  }
};

/// A CTA of the scan, in floats. kCopies: it copies keys and queries of two chunks; otherwise it
/// reads them in the workspace, for devices where they do not fit.
template <int kKeyDim, bool kCopies>
struct DeltaScanShared {
  static constexpr int kKeyRow = kKeyDim + kFragmentPadding;
  static constexpr int kKeyFloats = kChunkRows * kKeyRow;
  static constexpr int kPairFloats = 2 * kKeyFloats;  ///< Keys, queries.
  /// The transform, the scores and ChunkRows.
  static constexpr int kHeadFloats = 2 * ChunkLayout::kSquareFloats + ChunkLayout::kRowsFloats;

  static constexpr int kHead = kCopies ? 2 * kPairFloats : 0;
  static constexpr int kValues = kHead + kHeadFloats;
  static constexpr int kState = kValues + ChunkLayout::kValueFloats;
  static constexpr int kNews = kState + kKeyDim * kScanRow;  ///< V - exp(G) K S, then decayed D.
  static constexpr int kDeltas = kNews + kChunkRows * kScanRow;  ///< D
  static constexpr int kBarriers = kDeltas + kChunkRows * kScanRow;
  static constexpr int kBytes = kBarriers * 4 + 3 * 8;
};

}  // namespace marlin::cuda
