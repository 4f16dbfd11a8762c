#include "checkpoint/codes/tiled_codes.h"

#include <cstdint>
#include <cstring>
#include <span>

#include "base/checked.h"
#include "base/macros.h"
#include "marlin/layout.h"

namespace marlin {
namespace {

constexpr int64_t kTileBlock = 32;
constexpr int64_t kLanes = 32;
constexpr int64_t kWordsOfLane = 4;

/// Words of one matrix in both layouts.
struct WordCounts {
  int64_t packed = 0;
  int64_t tiled = 0;

  explicit WordCounts(const WeightsSpec& spec)
      : packed(WordsAlongK(spec) * spec.n), tiled(MarlinW4WordCount(spec.k, spec.n)) {}
};

std::span<uint32_t> WordsOf(const AlignedBuffer& buffer, int64_t first, int64_t count) {
  return {reinterpret_cast<uint32_t*>(buffer.data()) + first, static_cast<size_t>(count)};
}

}  // namespace

bool HasTiledLayout(const WeightsSpec& spec) {
  return GetFormatInfo(spec.format).bits == 4 && spec.sparsity == Sparsity::kDense;
}

Shape TiledShape(const WeightsSpec& spec) {
  return {CeilDivide(spec.k, kTileBlock), CeilDivide(spec.n, kTileBlock), kLanes, kWordsOfLane};
}

Result<AlignedBuffer> TileCodes(const QuantizedWeights& weights) {
  const WeightsSpec& spec = weights.spec;
  const WordCounts words(spec);
  MARLIN_ASSIGN_OR_RETURN(AlignedBuffer tiles,
                          AlignedBuffer::Allocate(spec.experts * words.tiled * 4));
  for (int64_t e = 0; e < spec.experts; ++e) {
    const std::span<const uint32_t> from(weights.codes.As<uint32_t>() + e * words.packed,
                                         static_cast<size_t>(words.packed));
    MARLIN_RETURN_IF_ERROR(
        RepackToMarlinW4(spec.k, spec.n, from, WordsOf(tiles, e * words.tiled, words.tiled)));
  }
  return tiles;
}

Result<AlignedBuffer> UntileCodes(const WeightsSpec& spec, const std::byte* tiles) {
  const WordCounts words(spec);
  MARLIN_ASSIGN_OR_RETURN(AlignedBuffer packed,
                          AlignedBuffer::Allocate(spec.experts * words.packed * 4));
  // Tensors of files may be misaligned.
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer one, AlignedBuffer::Allocate(words.tiled * 4));
  for (int64_t e = 0; e < spec.experts; ++e) {
    std::memcpy(one.data(), tiles + e * words.tiled * 4, static_cast<size_t>(words.tiled * 4));
    MARLIN_RETURN_IF_ERROR(RepackFromMarlinW4(spec.k, spec.n, WordsOf(one, 0, words.tiled),
                                              WordsOf(packed, e * words.packed, words.packed)));
  }
  return packed;
}

}  // namespace marlin
