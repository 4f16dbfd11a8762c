// Packs k-packed codes into CPU panels, one (block, chunk) at a time.
#pragma once

#include <cstdint>

#include "backends/cpu/pack/panels.h"

namespace marlin::cpu {

/// The source of chunks: k-packed words [words_along_k, n], or [k, n] elements of 16 or 32 bits.
struct ChunkSource {
  const void* codes;
  int64_t k;
  int64_t n;
  int bits;
};

/// Packs one chunk, ChunkBytes(bits) bytes, of the block of up to 16 `columns` from `first_column`
/// on. Precondition: out is 16-byte aligned.
void PackChunk(const ChunkSource& source, int64_t first_column, int64_t columns, int64_t chunk,
               uint8_t* out);

/// Prefetches the memory that PackChunk will read: rows are n elements apart, a stride that
/// hardware prefetchers do not follow.
void PrefetchChunk(const ChunkSource& source, int64_t first_column, int64_t columns, int64_t chunk);

/// Shape of the input of PackTile: the rows of a chunk, 16 elements each.
struct TileShape {
  int64_t rows;
  int64_t element_bytes;
};
TileShape TileShapeOf(int bits);
inline constexpr int64_t kMaxTileBytes = int64_t{kChunkK} * kBlockRows * 4;

/// PackChunk from a tile of that shape, 16-byte aligned.
void PackTile(int bits, const uint8_t* tile, uint8_t* out);

/// Position of the k-th 32-bit element of a column: in every slice of 32, even k come first.
constexpr int64_t PlaceInSlice(int64_t k) {
  return k / kSliceK * kSliceK + k % 2 * (kSliceK / 2) + k % kSliceK / 2;
}

/// Source of group parameters: elements [groups, n].
struct GroupSource {
  const void* data;
  int64_t element_bytes;
  int64_t groups;
  int64_t n;
};

/// Copies columns to `out`, [groups][16].
void PackGroups(const GroupSource& source, int64_t first_column, int64_t columns, uint8_t* out);

}  // namespace marlin::cpu
