// Where codes lie in prepared weights: the arithmetic of the picture in kernels/parameters.h.
#pragma once

#include <cstdint>

#include "backends/metal/kernels/parameters.h"
#include "marlin/format.h"

namespace marlin::metal {

constexpr int64_t ChunkBytes(int bits) { return int64_t{kernels::kChunkK} * bits; }

/// Word `word` of a lane's 32 codes of a chunk, in words from the chunk's begin.
constexpr int WordOffset(int bits, int lane, int word) {
  constexpr int kLanes = kernels::kLanes;
  if (bits == 2) return lane * 2 + word;
  if (bits == 3) return word < 2 ? lane * 2 + word : kLanes * 2 + lane;
  return (word / 4) * (kLanes * 4) + lane * 4 + word % 4;
}

/// The word that holds pair `j` of block `s`, of up to 16 bits, and the bit of its first code; the
/// second one's is 16 more. Of 3 bits the lower two; the third is HighBitOf's.
struct PairPlace {
  int word;
  int bit;
};
constexpr PairPlace PlaceOf(int bits, int s, int j) {
  if (bits < 4) return {s / 2, 8 * (s % 2) + 2 * j};
  if (bits == 4) return {s, 4 * j};
  if (bits == 8) return {2 * s + j / 2, 8 * (j % 2)};
  return {4 * s + j, 0};
}
constexpr PairPlace HighBitOf(int s, int j) { return {2, 4 * s + j}; }

/// How a format's codes become numbers; its table of values does for all that have no decoder.
kernels::CodeKind CodeKindOf(Format format);
/// What integers are packed with: value = (code ^ flip) - offset. The flip makes two's complement
/// count from the smallest number up; codes are packed with it.
int CodeFlipOf(Format format);
int CodeOffsetOf(Format format);
kernels::ElementType ElementTypeOf(ScaleType type);
kernels::ElementType ElementTypeOf(DType type);

}  // namespace marlin::metal
