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

/// Writes the ChunkBytes(bits) bytes of one (block, chunk). Precondition: out is 16-byte aligned.
void PackChunk(const ChunkSource& source, int64_t block, int64_t chunk, uint8_t* out);

/// Asks for the memory that PackChunk will read for `blocks` blocks from `block` on: rows lie n
/// elements apart, which no hardware prefetcher follows.
void PrefetchChunk(const ChunkSource& source, int64_t block, int64_t blocks, int64_t chunk);

/// Copies [groups, n] elements of element_bytes to [block][padded groups][16] for one block.
void PackGroups(const void* source, int64_t element_bytes, int64_t groups, int64_t padded_groups,
                int64_t n, int64_t block, uint8_t* out);

}  // namespace marlin::cpu
