// Where the rows and columns of a tensor elsewhere lie in the tensors of a GGUF file.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/readers/gguf/gguf_names.h"
#include "recipe/decoder_shape.h"

namespace marlin {

/// The heads that orders of rows depend on; 0 where a model has none of the kind.
struct GgufHeads {
  int64_t queries = 0;
  int64_t keys = 0;
  // Gated delta nets.
  int64_t delta_keys = 0;
  int64_t delta_values = 0;
  int64_t delta_key_dim = 0;
  int64_t delta_value_dim = 0;

  int64_t values_per_key() const { return delta_values / delta_keys; }
  int64_t key_rows() const { return delta_keys * delta_key_dim; }
  int64_t value_rows() const { return delta_values * delta_value_dim; }
  /// Whether there is a gated delta net whose value heads belong to key heads.
  bool has_delta() const {
    constexpr int64_t kMost = 1 << 16;
    for (const int64_t size : {delta_keys, delta_values, delta_key_dim, delta_value_dim}) {
      if (size < 1 || size > kMost) return false;
    }
    return delta_values % delta_keys == 0;
  }
};

/// The heads of a model's gated delta nets.
GgufHeads GgufDeltaHeads(const Dimensions& dimensions);

/// Row r of a head of `head_dim` rows is stored at this row: llama's converter puts the two rows
/// that RoPE rotates together next to each other, Hugging Face half a head apart.
constexpr int64_t HeadRow(int64_t row, int64_t head_dim) {
  const int64_t head = row / head_dim * head_dim;
  const int64_t in_head = row % head_dim;
  const int64_t half = head_dim / 2;
  return head + in_head % half * 2 + in_head / half;
}

/// Value head h is stored at this place: files have the first head of every key head, then the
/// second ones; elsewhere a key head's value heads are side by side.
constexpr int64_t TiledHead(int64_t head, int64_t key_heads, int64_t values_per_key) {
  return head % values_per_key * key_heads + head / values_per_key;
}

/// For each of `count` rows of a tensor elsewhere the row of the file's tensor that it is; -1: it
/// is in another tensor. Of the parts of a projection (kQkvOfHeads ...), `count` rows are the
/// part's, and the result has their rows in the projection of one key head after another. Empty if
/// such heads cannot have `count` rows.
std::vector<int64_t> GgufRowPlaces(GgufPlace::Rows rows, const GgufHeads& heads, int64_t count);

/// Whether the rows belong to a part of a projection.
constexpr bool IsOfHeads(GgufPlace::Rows rows) { return rows >= GgufPlace::Rows::kQkvOfHeads; }
/// The number of rows of a part, and of its projection. Precondition: IsOfHeads, has_delta.
int64_t PartRows(GgufPlace::Rows rows, const GgufHeads& heads);
int64_t ProjectionRows(GgufPlace::Rows rows, const GgufHeads& heads);

/// For each of the `count` rows of a tensor elsewhere, which is to be written, the row of the
/// file's tensor that it becomes; -1: it is in another tensor. Empty if such heads cannot have
/// `count` rows.
std::vector<int64_t> GgufWrittenPlaces(GgufPlace::Rows rows, const GgufHeads& heads, int64_t count);

/// The column of a tensor in a file that a column elsewhere is, of `count`.
int64_t GgufColumn(const GgufPlace& place, const GgufHeads& heads, int64_t count, int64_t column);

/// For each value head elsewhere its place in a file, and the other way around, for columns of
/// value heads. Precondition: has_delta.
std::vector<int64_t> TiledHeads(const GgufHeads& heads);
std::vector<int64_t> UntiledHeads(const GgufHeads& heads);

}  // namespace marlin
