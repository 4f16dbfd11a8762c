// The parameters of the attention kernels: plain structs that pass from host to device by value.
#pragma once

#include <cstdint>

#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/layout/value_record.h"

namespace marlin::cuda {

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
// A key block is in one page.
static_assert(kSegmentKeys % kKeyBlock == 0 && kCachePageTokens % kKeyBlock == 0);
/// Attention on matrix units: query heads of a token, rows of a warpgroup in prefill, and of a CTA.
/// Sums of more than 128 features and two terms of weights leave registers for one warpgroup.
inline constexpr int kDecodeHeads = 16;
inline constexpr int kWarpgroupRows = 64;
MARLIN_HOST_DEVICE constexpr int PrefillRows(int value_dim, bool one_term) {
  return value_dim > 128 && !one_term ? kWarpgroupRows : 2 * kWarpgroupRows;
}
/// Features of a head in decode, and in tiles of several tokens.
inline constexpr int kMostMatrixFeatures = 512;
inline constexpr int kMostTileFeatures = 256;
/// The most features of a latent key and value: the latent of DeepSeek's MLA, in keys with its RoPE
/// part.
inline constexpr int kMostLatentKeyFeatures = 576;
inline constexpr int kMostLatentValueFeatures = 512;
/// The most of all other kernels.
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
  float softcap = 0;
  int window = 0;
  bool chunked = false;  ///< AttentionOptions::chunked.
  const float* sinks = nullptr;
  bool one_term = false;  ///< AttentionOptions::allow_bf16_activations.
  int tile_rows = 16;     ///< Query rows of a CTA: 4 or 16.
  int tiles = 0;          ///< No fewer than there are.
  /// Split-KV: a CTA takes one of this many segments, and its sums go to `partials`. 0: all
  /// segments. On matrix units: the parts of a token's keys.
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

}  // namespace marlin::cuda
