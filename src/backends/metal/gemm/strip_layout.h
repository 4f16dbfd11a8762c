// Offsets of codes in prepared weights, as specified in kernels/parameters.h.
#pragma once

#include <cstdint>

#include "backends/metal/kernels/parameters.h"
#include "marlin/format.h"
#include "marlin/weights.h"

namespace marlin::metal {

/// MARLIN_CONSTANT_CODE_BITS of weights.
int CodeBitsOf(const WeightsSpec& spec);

constexpr int64_t ChunkBytes(int code_bits) {
  return int64_t{kernels::kChunkK} * kernels::StoredBits(code_bits);
}

/// Offset, in words from the start of a chunk, of word `word` of a lane's 32 codes.
constexpr int WordOffset(int bits, int lane, int word) {
  constexpr int kLanes = kernels::kLanes;
  if (bits == 2) return lane * 2 + word;
  if (bits == 3 || bits == kernels::kSparse4) return word < 2 ? lane * 2 + word : kLanes * 2 + lane;
  return (word / 4) * (kLanes * 4) + lane * 4 + word % 4;
}

/// Position of pair `j` of block `s` in a lane's words, for codes of up to 16 bits. The second code
/// is 16 bits above the first. For 3-bit codes: the lower two bits; HighBitOf places the third. For
/// 4-bit codes: the word, in which PairOf4Bits places them.
struct PairPlace {
  int word;
  int bit;  ///< Bit of the pair's first code.
};
constexpr PairPlace PlaceOf(int bits, int s, int j) {
  if (bits < 4) return {s / 2, 8 * (s % 2) + 2 * j};
  if (bits == 4) return {s, 0};
  if (bits == 8) return {2 * s + j / 2, 8 * (j % 2)};
  return {4 * s + j, 0};
}
constexpr PairPlace HighBitOf(int s, int j) { return {2, 4 * s + j}; }
/// Pair `j` of a block of 4-bit codes as the bits of its word.
constexpr uint32_t PairOf4Bits(kernels::CodeKind kind, int j, uint32_t first, uint32_t second) {
  if (kind == kernels::kCodesTable) return (first | second << 4) << (8 * j);
  if (kind != kernels::kCodesFp4) return (first | second << 16) << (4 * j);
  const uint32_t magnitudes = (first & 7U) | (second & 7U) << 16;
  const uint32_t signs = first >> 3 | second >> 3 << 16;
  return magnitudes << (9 - 3 * j) | signs << (15 - j);
}

/// The decoder of a format; formats without one of their own use their value table.
kernels::CodeKind CodeKindOf(Format format);
/// Integer formats: codes are packed as packed = code ^ flip, which maps two's complement to offset
/// binary; value = packed - offset.
int CodeFlipOf(Format format);
int CodeOffsetOf(Format format);
kernels::ElementType ElementTypeOf(ScaleType type);
kernels::ElementType ElementTypeOf(DType type);

}  // namespace marlin::metal
