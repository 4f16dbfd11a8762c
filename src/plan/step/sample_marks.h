// Why a row of logits has no token: negative numbers in the token's place, by which a row's error
// stays its own and reaches the host with the tokens of the others.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/status.h"

namespace marlin {

/// Tokens of a vocabulary, at most: marks have room for them.
inline constexpr int64_t kMostVocab = int64_t{1} << 29;

inline constexpr int32_t kNoToken = -1;      ///< None was sampled.
inline constexpr int32_t kNoLogitMark = -2;  ///< Minus infinity for every token.
inline constexpr int32_t kMaskMark = -3;     ///< Minus infinity for every token that is allowed.
/// Not sampled, since a row before had another token than its draft; no error.
inline constexpr int32_t kSkippedMark = -4;
inline constexpr int32_t kMaskRowMark = -5;  ///< The row's mask is none.
/// The mark of token t whose logit is NaN is this minus 2 t, of +infinity one less.
inline constexpr int32_t kLogitMark = -6;

constexpr int32_t LogitMark(int32_t token, bool infinite) {
  return kLogitMark - 2 * token - (infinite ? 1 : 0);
}

/// The error of a row whose sampled token is a mark; ok for a token and for kSkippedMark.
Status SampleError(int32_t token);

/// How many tokens there are before the first mark.
int64_t CountSampled(std::span<const int32_t> tokens);

/// The error of the first mark in `rows` rows of tokens, all of the same length.
Status FirstSampleError(std::span<const int32_t> tokens, int64_t rows);

}  // namespace marlin
