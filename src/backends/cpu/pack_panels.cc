#include "backends/cpu/pack_panels.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/mutant.h"

namespace marlin::cpu {
namespace {

/// Codes of a chunk, k by k; all loops below run over the 16 columns and vectorise.
struct Tile {
  uint8_t code[kChunkK][kBlockRows];
};

/// Loads 16 words of row `row` of the canonical matrix, zero beyond its edges.
void LoadWordRow(const ChunkSource& source, int64_t row, int64_t rows, int64_t first_column,
                 uint32_t* words) {
  const int64_t columns = std::min<int64_t>(kBlockRows, source.n - first_column);
  if (columns < kBlockRows || row >= rows) std::memset(words, 0, sizeof(uint32_t) * kBlockRows);
  if (row >= rows) return;
  const auto* base = static_cast<const uint32_t*>(source.codes) + row * source.n + first_column;
  // Rows lie n words apart, which no hardware prefetcher follows.
  constexpr int64_t kRowsAhead = 32;
  if (row + kRowsAhead < rows) __builtin_prefetch(base + kRowsAhead * source.n);
  std::memcpy(words, base,
              sizeof(uint32_t) * static_cast<size_t>(MARLIN_MUTATE(10, columns, columns - 1)));
}

/// The codes at bit `shift` of 16 words; one that straddles goes on in the words after.
template <int kBits>
void ExtractCodes(const uint32_t* low, [[maybe_unused]] const uint32_t* high, int shift,
                  uint8_t* codes) {
  constexpr uint32_t kMask = (1u << kBits) - 1u;
  for (int n = 0; n < kBlockRows; ++n) {
    if constexpr (32 % kBits == 0) {
      codes[n] = static_cast<uint8_t>((low[n] >> shift) & kMask);
    } else {
      const uint64_t both = low[n] | (static_cast<uint64_t>(high[n]) << 32);
      codes[n] = static_cast<uint8_t>((both >> shift) & kMask);
    }
  }
}

template <int kBits>
void UnpackTile(const ChunkSource& source, int64_t block, int64_t chunk, Tile& tile) {
  // 32 codes fill kBits words in every width; unused tail words are zero.
  const int64_t rows =
      32 % kBits == 0 ? CeilDivide(source.k, 32 / kBits) : kBits * CeilDivide(source.k, 32);
  const int64_t first_row = chunk * kChunkK / 32 * kBits;
  uint32_t words[kBits + 1][kBlockRows];
  std::memset(words[kBits], 0, sizeof(words[kBits]));
  for (int run = 0; run < kChunkK / 32; ++run) {
    for (int i = 0; i < kBits; ++i) {
      LoadWordRow(source, first_row + run * kBits + i, rows, block * kBlockRows, words[i]);
    }
    for (int j = 0; j < 32; ++j) {
      const int bit = j * kBits;
      ExtractCodes<kBits>(words[bit / 32], words[MARLIN_MUTATE(11, bit / 32 + 1, bit / 32)],
                          bit % 32, tile.code[run * 32 + j]);
    }
  }
}

/// fields[w][n]: the codes k = w + 32 j of column n at bits kBits * j, the word of panels.h.
template <int kBits>
void JoinSlices(const Tile& tile, uint16_t (&fields)[kSliceK][kBlockRows]) {
  for (int w = 0; w < kSliceK; ++w) {
    for (int n = 0; n < kBlockRows; ++n) {
      fields[w][n] = static_cast<uint16_t>(
          tile.code[w][n] | tile.code[MARLIN_MUTATE(12, w + 32, w + 31)][n] << kBits |
          tile.code[w + 64][n] << (2 * kBits) | tile.code[w + 96][n] << (3 * kBits));
    }
  }
}

void Pack4(const Tile& tile, uint16_t* out) {
  uint16_t fields[kSliceK][kBlockRows];
  JoinSlices<4>(tile, fields);
  for (int n = 0; n < kBlockRows; ++n) {
    for (int w = 0; w < kSliceK; ++w) out[32 * n + w] = fields[w][n];
  }
}

void Pack3(const Tile& tile, uint16_t* out) {
  uint16_t fields[kSliceK][kBlockRows];
  JoinSlices<3>(tile, fields);
  for (int quad = 0; quad < 4; ++quad) {
    for (int w = 0; w < kSliceK; ++w) {
      const uint32_t fourth = fields[w][4 * quad + 3];
      for (int r = 0; r < 3; ++r) {
        out[32 * (3 * quad + r) + w] =
            static_cast<uint16_t>(fields[w][4 * quad + r] | ((fourth >> (4 * r)) & 0xfu) << 12);
      }
    }
  }
}

void Pack2(const Tile& tile, uint16_t* out) {
  uint16_t fields[kSliceK][kBlockRows];
  JoinSlices<2>(tile, fields);
  for (int pair = 0; pair < 8; ++pair) {
    for (int w = 0; w < kSliceK; ++w) {
      out[32 * pair + w] =
          static_cast<uint16_t>(fields[w][2 * pair] | fields[w][2 * pair + 1] << 8);
    }
  }
}

void Pack8(const Tile& tile, uint16_t* out) {
  for (int n = 0; n < kBlockRows; ++n) {
    for (int half = 0; half < 2; ++half) {
      for (int w = 0; w < kSliceK; ++w) {
        out[64 * n + 32 * half + w] = static_cast<uint16_t>(tile.code[64 * half + w][n] |
                                                            tile.code[64 * half + 32 + w][n] << 8);
      }
    }
  }
}

void Pack16(const ChunkSource& source, int64_t block, int64_t chunk, uint16_t* out) {
  const auto* values = static_cast<const uint16_t*>(source.codes);
  for (int n = 0; n < kBlockRows; ++n) {
    const int64_t column = block * kBlockRows + n;
    for (int i = 0; i < kChunkK; ++i) {
      const int64_t k = chunk * kChunkK + i;
      const bool inside = column < source.n && k < MARLIN_MUTATE(13, source.k, source.k - 1);
      out[kChunkK * n + i] = inside ? values[k * source.n + column] : uint16_t{0};
    }
  }
}

void Pack32(const ChunkSource& source, int64_t block, int64_t chunk, uint32_t* out) {
  const auto* values = static_cast<const uint32_t*>(source.codes);
  for (int n = 0; n < kBlockRows; ++n) {
    const int64_t column = block * kBlockRows + n;
    for (int i = 0; i < kChunkK; ++i) {
      const int place = i / kSliceK * kSliceK + i % 2 * (kSliceK / 2) + i % kSliceK / 2;
      const int64_t k = chunk * kChunkK + i;
      const bool inside = column < source.n && k < source.k;
      out[kChunkK * n + place] = inside ? values[k * source.n + column] : 0u;
    }
  }
}

}  // namespace

void PackChunk(const ChunkSource& source, int64_t block, int64_t chunk, uint8_t* out) {
  auto* words = reinterpret_cast<uint16_t*>(out);
  Tile tile;
  switch (source.bits) {
    case 2:
      UnpackTile<2>(source, block, chunk, tile);
      return Pack2(tile, words);
    case 3:
      UnpackTile<3>(source, block, chunk, tile);
      return Pack3(tile, words);
    case 4:
      UnpackTile<4>(source, block, chunk, tile);
      return Pack4(tile, words);
    case 8:
      UnpackTile<8>(source, block, chunk, tile);
      return Pack8(tile, words);
    case 32:
      return Pack32(source, block, chunk, reinterpret_cast<uint32_t*>(out));
    default:
      return Pack16(source, block, chunk, words);
  }
}

void PackGroups(const void* source, int64_t element_bytes, int64_t groups, int64_t padded_groups,
                int64_t n, int64_t block, uint8_t* out) {
  const int64_t first = block * kBlockRows;
  const int64_t columns = std::min<int64_t>(kBlockRows, n - first);
  const int64_t row_bytes = kBlockRows * element_bytes;
  std::memset(out, 0, static_cast<size_t>(padded_groups * row_bytes));
  const auto* bytes = static_cast<const uint8_t*>(source);
  for (int64_t group = 0; group < MARLIN_MUTATE(14, groups, groups - groups / 2); ++group) {
    std::memcpy(out + group * row_bytes, bytes + (group * n + first) * element_bytes,
                static_cast<size_t>(columns * element_bytes));
  }
}

}  // namespace marlin::cpu
