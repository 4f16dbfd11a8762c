// Rows, indices, pages and sequences as parameters of the decoder's kernels: plain structs that
// pass from host to device by value.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/device_views.h"

namespace marlin::cuda {

/// Rows of contiguous elements: a view of rank 2, or of rank 3 with its first two dimensions
/// flattened. Strides count elements.
struct RowsView {
  void* data = nullptr;  ///< Inputs are not written.
  Element type = Element::kF32;
  int64_t rows = 0;
  int inner = 1;  ///< The second of three dimensions.
  int64_t stride = 0;
  int64_t inner_stride = 0;

  /// The first element of a row. Flattened rows are numbered in 32 bits: a division in 64 bits is
  /// a hundred instructions.
  MARLIN_HOST_DEVICE int64_t At(int64_t row) const {
    if (inner == 1) return row * stride;
    const auto number = static_cast<uint32_t>(row);
    const uint32_t outer = number / static_cast<uint32_t>(inner);
    return At(outer, static_cast<int>(number - outer * static_cast<uint32_t>(inner)));
  }
  /// The first element of row `of_outer` of the second dimension, without a division.
  MARLIN_HOST_DEVICE int64_t At(int64_t outer, int of_outer) const {
    return outer * stride + of_outer * inner_stride;
  }
};

/// Ids or positions.
struct IndexView {
  const void* data = nullptr;
  bool wide = false;  ///< i64; else i32.

  MARLIN_HOST_DEVICE int64_t At(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i]
                : int64_t{static_cast<const int32_t*>(data)[i]};
  }
};

/// RotaryEmbedding.
struct RotaryView {
  const float* frequencies = nullptr;
  int pairs = 0;
  float factor = 1;
  bool interleaved = false;
};

/// Slabs that are kernel parameters; more are read from device memory.
inline constexpr int kMostSlabParameters = 256;

/// Tokens of a page: the result of CachePageTokens.
inline constexpr int kCachePageTokens = 64;

/// A paged KV cache, as PagedCache.
struct PagesView {
  void* slabs[kMostSlabParameters] = {};
  void* const* more_slabs = nullptr;  ///< All of them, if there are more.
  int slab_count = 0;
  uint32_t slab_pages = 1;  ///< No more than there are page numbers.
  int64_t page_stride = 0;
  int64_t first_element = 0;
  Element type = Element::kF32;
  int page_tokens = 1;
  int kv_heads = 1;
  int key_dim = 0;
  int value_dim = 0;
  bool values_in_keys = false;
};

/// The rows of a step, as SequenceRows.
struct SequencesView {
  const int32_t* positions = nullptr;     ///< [rows]
  const int32_t* first_rows = nullptr;    ///< [count + 1]
  const int32_t* block_tables = nullptr;  ///< [count, blocks]
  int rows = 0;
  int count = 0;
  int blocks = 0;
};

}  // namespace marlin::cuda
