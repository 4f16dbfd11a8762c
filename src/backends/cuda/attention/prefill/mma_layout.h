// The kernels of prefill on mma.sync: the tile of a CTA and its shared memory.
#pragma once

#include "backends/cuda/attention/attention_layout.h"
#include "backends/cuda/attention/rows_layout.h"

namespace marlin::cuda {

inline constexpr int kMmaStages = 2;

/// The heads of a call.
struct MmaHeads {
  int key_dim = 0;
  int value_dim = 0;
  int query_terms = 2;  ///< bf16 terms of a query: 1 if queries are bf16, or may be rounded to it.
  bool fp8 = false;     ///< The cache has codes of e4m3.
};

/// Offsets in shared memory: queries, then rows of a block that are multiplied. Of bf16 all stages
/// are; stages of codes come after one widened block.
struct MmaLayout {
  int key_row;  ///< Bytes from row to row.
  int value_row;
  int keys;
  int query_bytes;  ///< One term.
  int queries;      ///< All terms.
  int block_bytes;
  int stage_bytes;
  int stages_at;
  int bytes;

  MARLIN_HOST_DEVICE constexpr MmaLayout(const MmaHeads& of, int rows, int block_keys)
      : key_row(SwizzledRowBytes(of.key_dim)),
        value_row(SwizzledRowBytes(of.value_dim)),
        keys(block_keys),
        query_bytes(rows * key_row),
        queries(of.query_terms * query_bytes),
        block_bytes(keys * (key_row + value_row)),
        stage_bytes(of.fp8 ? keys * (of.key_dim + of.value_dim) : block_bytes),
        stages_at(of.fp8 ? queries + block_bytes : queries),
        bytes(stages_at + kMmaStages * stage_bytes) {}
};

/// A kernel: a CTA has `warps` warps of 16 query rows, and adds `keys` keys at a time to sums of up
/// to `features` features.
struct MmaAttentionShape {
  int warps = 0;
  int keys = 0;
  int features = 0;

  constexpr bool operator==(const MmaAttentionShape&) const = default;
  constexpr int Rows() const { return warps * 16; }
  constexpr int Bytes(const MmaHeads& of) const { return MmaLayout(of, Rows(), keys).bytes; }
};

/// In the order in which a call takes them: the first that has its features and fits. Registers
/// bound keys times features.
inline constexpr MmaAttentionShape kMmaShapes[] = {{8, 64, 64},  {8, 64, 128}, {8, 32, 128},
                                                   {4, 32, 128}, {4, 32, 256}, {4, 16, 256}};

/// The kernel for heads of up to kMostTileFeatures.
constexpr MmaAttentionShape MmaShapeFor(const MmaHeads& of, int shared_bytes) {
  for (const MmaAttentionShape& shape : kMmaShapes) {
    if (of.value_dim <= shape.features && shape.Bytes(of) <= shared_bytes) return shape;
  }
  return kMmaShapes[5];
}

}  // namespace marlin::cuda
