// 2:4 metadata in the order of CUTLASS's sparse GEMMs, which sparse MMAs of 16-bit types load
// without further permutation.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/status.h"

namespace marlin {

// The operand is W^T [n, k], row-major, 2:4 along k. A unit is the four nibbles of 16 k of one row,
// lowest first. Two units of rows r and r + 8 share a word, the former in its low half:
//
//   word [k / 32][32 rows: n / 32][g: 8][t: 4]   rows 16 (t / 2) + g and 8 more, units t % 2 of 32
//   k
//
// Words of the canonical metadata [k / 32, n] hold both units of one row. Both have the nibble
// pos1 << 2 | pos0, so that conversion only moves halves of words.

/// Converts canonical metadata to CUTLASS's order. Both spans have k / 32 * n words and do not
/// overlap. Errors: kInvalidArgument unless k and n are multiples of 32 and the sizes are right,
/// kMalformedFile naming the first invalid nibble.
Status ToCutlassMetadata(int64_t k, int64_t n, std::span<const uint32_t> canonical,
                         std::span<uint32_t> reordered);

/// The inverse, with the same errors.
Status FromCutlassMetadata(int64_t k, int64_t n, std::span<const uint32_t> reordered,
                           std::span<uint32_t> canonical);

}  // namespace marlin
