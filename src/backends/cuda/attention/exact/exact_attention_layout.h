// The shared memory of exact attention.
#pragma once

#include "backends/cuda/attention/attention_layout.h"

namespace marlin::cuda {

/// Keys that do not fit are loaded in parts of this many features.
inline constexpr int kKeyPartFeatures = 256;

/// Rows of features in shared memory are padded so that lanes read them without bank conflicts.
MARLIN_HOST_DEVICE constexpr int PaddedFeatures(int features) { return (features + 3) / 4 * 4 + 4; }

/// Bytes of a CTA of `rows` query rows: queries, a block of keys of `key_width` features each,
/// weights, and five numbers of a row.
constexpr int ExactAttentionBytes(int rows, int key_dim, int key_width) {
  const int floats = rows * PaddedFeatures(key_dim) + kKeyBlock * PaddedFeatures(key_width) +
                     (kKeyBlock + 5) * rows;
  return floats * int{sizeof(float)};
}

/// The tile of a call: its bits do not depend on it.
struct ExactTile {
  int rows = 16;
  bool in_parts = false;  ///< Keys are loaded in parts.

  constexpr int Bytes(int key_dim) const {
    return ExactAttentionBytes(rows, key_dim, in_parts ? kKeyPartFeatures : key_dim);
  }
};

/// `rows`: those that the call would fill, 4 or 16. Fewer, and parts of keys, where shared memory
/// is small.
constexpr ExactTile ExactTileFor(int rows, int key_dim, int shared_bytes) {
  if (ExactTile{rows}.Bytes(key_dim) <= shared_bytes) return {rows};
  if (ExactTile{4}.Bytes(key_dim) <= shared_bytes) return {4};
  return {4, true};
}

}  // namespace marlin::cuda
