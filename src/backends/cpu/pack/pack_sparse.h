// Packs 2:4 weights of 4 bits into the panels of panels.h, one (block, chunk) at a time.
#pragma once

#include <cstdint>

#include "backends/cpu/pack/panels.h"

namespace marlin::cpu {

/// Rows of words of a chunk: 8 kept codes, or the metadata of 8 blocks, in each.
inline constexpr int kSparseTileValues = kChunkK / 16;
inline constexpr int kSparseTileMetadata = kChunkK / 32;

/// The words of a chunk of 16 columns (docs/formats/sparse_24.md).
struct SparseTile {
  uint32_t values[kSparseTileValues][kBlockRows];
  uint32_t metadata[kSparseTileMetadata][kBlockRows];
};

/// A tile of zeros, with valid metadata.
SparseTile EmptySparseTile(uint32_t zero_code);

/// Writes ChunkBytes(kSparse4).
void PackSparseTile(const SparseTile& tile, uint32_t zero_code, uint8_t* out);

}  // namespace marlin::cpu
