// 2:4 sparsity: what the packing, the pruning and the validation of kept codes share.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "marlin/format.h"
#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

inline constexpr int64_t kSparseBlock = 4;  ///< Codes along k, two of which are kept.
inline constexpr int64_t kSparseRun = 32;   ///< k is padded to whole metadata words.

/// Errors: kInvalidArgument for a format without 2:4, kUnsupported where the code of weight 0
/// depends on the group or does not exist. A codebook of the caller's own may still lack it.
Status CheckSparse24(Format format, bool has_offsets);

/// The values of the codes: the weights' own codebook if they have one, otherwise the format's.
std::span<const float> CodeValues(const QuantizedWeights& weights);

/// The code whose value is 0, if there is one.
std::optional<uint32_t> CodeOfZero(std::span<const float> values);

/// The error of the first invalid nibble of metadata [blocks / 8, n], kMalformedFile; `where`
/// precedes the block's number.
Status CheckNibbles(int64_t blocks, int64_t n, const uint32_t* metadata, const std::string& where);

/// Checks the nibbles of 2:4 weights, and that a code has the value 0. Precondition: the views have
/// the shapes of the spec. Errors: kMalformedFile naming the first invalid nibble, kUnsupported.
Status CheckMetadata(const QuantizedWeights& weights);

}  // namespace marlin
