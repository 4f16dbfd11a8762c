// Canonical codes -> CPU panels, one (block, chunk) at a time.
#pragma once

#include <cstdint>

#include "backends/cpu/panels.h"

namespace marlin::cpu {

/// Where a chunk comes from: canonical words [words_along_k, n], or values [k, n] of 16 or 32 bits.
struct ChunkSource {
  const void* codes;
  int64_t k;
  int64_t n;
  int bits;
};

/// Writes the ChunkBytes(bits) bytes of one chunk of the block of up to 16 `columns` from
/// `first_column` on. Precondition: out is 16-byte aligned.
void PackChunk(const ChunkSource& source, int64_t first_column, int64_t columns, int64_t chunk,
               uint8_t* out);

/// Asks for the memory that PackChunk will read: rows lie n elements apart, which no hardware
/// prefetcher follows.
void PrefetchChunk(const ChunkSource& source, int64_t first_column, int64_t columns, int64_t chunk);

/// The rows of a chunk, each of 16 elements, that PackTile takes.
struct TileShape {
  int64_t rows;
  int64_t element_bytes;
};
TileShape TileShapeOf(int bits);
inline constexpr int64_t kMaxTileBytes = int64_t{kChunkK} * kBlockRows * 4;

/// PackChunk of a chunk that lies in a tile of that shape, 16-byte aligned.
void PackTile(int bits, const uint8_t* tile, uint8_t* out);

/// Where the k-th of a column's 32-bit numbers lies: the even k of a slice of 32 come first.
constexpr int64_t PlaceInSlice(int64_t k) {
  return k / kSliceK * kSliceK + k % 2 * (kSliceK / 2) + k % kSliceK / 2;
}

/// Elements [groups, n].
struct GroupSource {
  const void* data;
  int64_t element_bytes;
  int64_t groups;
  int64_t n;
};

/// Copies columns to out, whose rows of 16 elements are groups.
void PackGroups(const GroupSource& source, int64_t first_column, int64_t columns, uint8_t* out);

}  // namespace marlin::cpu
