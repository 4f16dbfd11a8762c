#include "backends/cpu/pack/pack_sparse.h"

#include <algorithm>
#include <cstring>

namespace marlin::cpu {
namespace {

/// Eight nibbles as the low nibbles of eight bytes.
uint64_t SpreadToBytes(uint32_t nibbles) {
  uint64_t spread = nibbles;
  spread = (spread | spread << 16) & 0x0000ffff0000ffff;
  spread = (spread | spread << 8) & 0x00ff00ff00ff00ff;
  return (spread | spread << 4) & 0x0f0f0f0f0f0f0f0f;
}

}  // namespace

SparseTile EmptySparseTile(uint32_t zero_code) {
  constexpr uint32_t kFirstTwo = 0x44444444;
  SparseTile tile;
  std::fill_n(&tile.values[0][0], kSparseTileValues * kBlockRows, zero_code * 0x11111111u);
  std::fill_n(&tile.metadata[0][0], kSparseTileMetadata * kBlockRows, kFirstTwo);
  return tile;
}

void PackSparseTile(const SparseTile& tile, uint32_t zero_code, uint8_t* out) {
  constexpr int kHalf = kSparseTileValues / 2;
  const uint32_t flips = zero_code * 0x11111111u;
  for (int column = 0; column < kBlockRows; ++column) {
    uint8_t* const kept = out + kKeptBytes * column;
    for (int i = 0; i < kHalf; ++i) {
      const uint64_t bytes = SpreadToBytes(tile.values[i][column] ^ flips) |
                             SpreadToBytes(tile.values[kHalf + i][column] ^ flips) << 4;
      std::memcpy(kept + 8 * i, &bytes, sizeof(bytes));
    }
    uint8_t* const metadata = out + kMetadataOffset + kMetadataBytes * column;
    for (int i = 0; i < kSparseTileMetadata; ++i) {
      std::memcpy(metadata + 4 * i, &tile.metadata[i][column], 4);
    }
  }
}

}  // namespace marlin::cpu
