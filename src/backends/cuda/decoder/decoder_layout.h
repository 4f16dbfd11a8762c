// The parameters of the decoder's kernels: plain structs that pass from host to device by value.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/value_record.h"

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

struct RotaryArguments {
  RowsView x;  ///< [tokens, heads] rows.
  IndexView positions;
  const float* frequencies = nullptr;
  int pairs = 0;
  float factor = 1;
  bool interleaved = false;
  ErrorView errors;
};

/// Slabs that are kernel parameters; more are read from device memory.
inline constexpr int kMostSlabParameters = 256;

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

struct AppendArguments {
  RowsView keys;    ///< [rows, kv_heads] rows.
  RowsView values;  ///< Null data: in the keys.
  SequencesView sequences;
  PagesView pages;
  ErrorView errors;
};

/// The heads of a step's rows before attention; norms are null where there are none.
struct RotateAppendArguments {
  RowsView queries;  ///< [rows, heads] rows.
  RowsView keys;     ///< [rows, kv_heads] rows, as the values.
  RowsView values;
  int heads = 0;
  const void* query_norm = nullptr;
  const void* key_norm = nullptr;
  Element query_norm_type = Element::kF32;
  Element key_norm_type = Element::kF32;
  float epsilon = 0;
  const float* frequencies = nullptr;
  int pairs = 0;
  float factor = 1;
  bool interleaved = false;
  SequencesView sequences;
  PagesView pages;
  bool slabs_are_aligned = false;  ///< To 16 bytes.
  ErrorView errors;
};

/// Keys or values of one sequence in a strided tensor.
struct KeysView {
  const void* data = nullptr;
  Element type = Element::kF32;
  int64_t position_stride = 0;
  int64_t head_stride = 0;
};

/// Keys [first, end) are visible.
struct KeySpan {
  int first;
  int end;
};

inline constexpr int kKeyBlock = 32;      ///< Keys of an online-softmax step.
inline constexpr int kSegmentKeys = 128;  ///< Keys whose sums begin anew, and are merged in order.
inline constexpr int kCachePageTokens = 64;  ///< A key block lies in one page.
static_assert(kSegmentKeys % kKeyBlock == 0 && kCachePageTokens % kKeyBlock == 0);
/// Attention on matrix units: query heads of a token, features of a head, rows of a warpgroup in
/// prefill, and of a CTA. Sums of more than 128 features leave registers for one warpgroup.
inline constexpr int kDecodeHeads = 16;
inline constexpr int kWarpgroupRows = 64;
MARLIN_HOST_DEVICE constexpr int PrefillRows(int value_dim) {
  return value_dim > 128 ? kWarpgroupRows : 2 * kWarpgroupRows;
}
inline constexpr int kMostMatrixFeatures = 256;
inline constexpr int kMostKeyFeatures = 1024;
inline constexpr int kMostValueFeatures = 512;

/// Attention over a paged cache, or over one sequence of `length` keys (no block tables).
struct AttentionArguments {
  RowsView queries;  ///< [rows, heads] rows.
  RowsView out;
  SequencesView sequences;
  PagesView pages;
  KeysView keys;
  KeysView values;
  int length = 0;
  int kv_heads = 1;
  int group = 1;  ///< Query heads of a KV head.
  int key_dim = 0;
  int value_dim = 0;
  float scale = 1;
  int window = 0;
  const float* sinks = nullptr;
  int tile_rows = 16;  ///< Query rows of a CTA: 4 or 16.
  int tiles = 0;       ///< No fewer than there are.
  /// Split-KV: a CTA takes one of so many segments, and its sums go to `partials`. 0: all segments.
  /// On matrix units: the parts of a token's keys.
  int segments = 0;
  float* partials = nullptr;  ///< [tiles][kv_heads][segments][PartialFloats]
  /// Decode on matrix units: a counter for every tile and KV head, all ones before and after. Null:
  /// a second kernel merges.
  uint32_t* counters = nullptr;
  ErrorView errors;
};

/// Floats of a segment's sums: the largest score and the sum of weights of every row, and the
/// weighted values.
MARLIN_HOST_DEVICE constexpr int64_t PartialFloats(int tile_rows, int value_dim) {
  return int64_t{tile_rows} * (2 + value_dim);
}

/// SamplingOptions.
struct SamplingView {
  float temperature = 0;
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  int64_t top_k = 0;
  uint64_t seed = 0;
};

/// The sampler state of a sequence in device memory. One uint32_t per token follows: the lowest bit
/// is set if the prompt has the token, the upper bits count how often it was drawn.
struct SamplerState {
  static constexpr uint64_t kMagic = 0x6d61726c696e7363;  ///< Marks memory that was reset.
  static constexpr int kWords = 312;
  uint64_t magic = 0;
  int64_t vocab = 0;
  SamplingView options;
  uint64_t random[kWords] = {};  ///< mt19937_64
  int next = kWords;

  MARLIN_HOST_DEVICE uint32_t* seen() { return reinterpret_cast<uint32_t*>(this + 1); }
};

struct ResetArguments {
  SamplingView options;
  SamplerState* state = nullptr;
  int64_t vocab = 0;
  const int32_t* prompt = nullptr;
  int64_t tokens = 0;
  ErrorView errors;
};

struct SampleArguments {
  const float* logits = nullptr;
  int64_t logits_stride = 0;
  uint8_t* states = nullptr;
  int64_t state_stride = 0;
  const int32_t* state_rows = nullptr;  ///< Null: row r has state r.
  int32_t* tokens = nullptr;
  int64_t tokens_stride = 1;
  int rows = 0;
  int states_count = 0;
  int vocab = 0;
  ErrorView errors;
};

/// AdvanceTokensCall.
struct AdvanceArguments {
  const int32_t* sampled = nullptr;
  const int32_t* stop_ids = nullptr;
  int64_t stop_count = 0;
  int32_t* ids = nullptr;
  int32_t* positions = nullptr;
  int32_t* state_rows = nullptr;
  int32_t* counts = nullptr;
  int32_t* tokens = nullptr;
  int64_t rows = 0;
  int64_t steps = 0;
  ErrorView errors;
};

}  // namespace marlin::cuda
