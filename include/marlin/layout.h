// Conversions between arrangements of packed words, and the packing of single codes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/format.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

#pragma GCC visibility push(default)
namespace marlin {

/// Packs codes [k, n] (one byte each, C order) into canonical words [WordsAlongK, n].
/// Errors: kInvalidArgument for wrong sizes or a code that does not fit.
Status PackCodes(Format format, int64_t k, int64_t n, std::span<const uint8_t> codes,
                 std::span<uint32_t> words);

/// The inverse of PackCodes.
Status UnpackCodes(Format format, int64_t k, int64_t n, std::span<const uint32_t> words,
                   std::span<uint8_t> codes);

/// uint32 words of a 4-bit matrix in the marlin_w4 layout: K and N padded to multiples of 32;
/// INT64_MAX for sizes that are negative or too large to count.
int64_t MarlinW4WordCount(int64_t k, int64_t n);

/// Canonical 4-bit words [ceil(k/8), n] -> marlin_w4 [K/32][N/32][32 lanes][4 words], padded with
/// code 0, and back. Errors: kInvalidArgument for wrong sizes.
Status RepackToMarlinW4(int64_t k, int64_t n, std::span<const uint32_t> canonical,
                        std::span<uint32_t> tiles);
Status RepackFromMarlinW4(int64_t k, int64_t n, std::span<const uint32_t> tiles,
                          std::span<uint32_t> canonical);

/// From the layouts of the original Marlin (IST-DASLab) and of vLLM's gptq_marlin for 4 bits, both
/// int32 [k/16, n*2], to canonical words. Errors: kInvalidArgument unless k % 16 == 0 and
/// n % 64 == 0 (the layouts' own granule).
Status RepackFromOriginalMarlin(int64_t k, int64_t n, std::span<const uint32_t> words,
                                std::span<uint32_t> canonical);
Status RepackFromVllmMarlin(int64_t k, int64_t n, std::span<const uint32_t> words,
                            std::span<uint32_t> canonical);

/// The 2:4 sparse form of a 4-bit matrix: K padded to a multiple of 32.
struct Sparse24 {
  int64_t k = 0;  ///< Unpadded.
  int64_t n = 0;
  std::vector<uint32_t> values;  ///< [Kp/16, n]: 8 kept codes a word, two per block of 4, K order.
  std::vector<uint32_t> metadata;  ///< [Kp/32, n]: 8 nibbles a word, nibble = pos1 << 2 | pos0.
};

/// Keeps the two codes of largest decoded magnitude in every block of four along K (ties to the
/// lower index; with `saliency` [k, n] f32, the two of largest saliency).
/// Errors: kInvalidArgument for wrong sizes or a format that is not 4-bit.
Result<Sparse24> PackSparse24(Format format, int64_t k, int64_t n,
                              std::span<const uint32_t> canonical,
                              std::span<const float> saliency = {});

/// Writes canonical words with the pruned positions as the code of value 0.
/// Errors: kMalformedFile naming the first invalid nibble (valid: 4, 8, 9, 12, 13, 14),
/// kUnsupported for a format without a code of value 0.
Status UnpackSparse24(Format format, const Sparse24& sparse, std::span<uint32_t> canonical);

}  // namespace marlin
#pragma GCC visibility pop
