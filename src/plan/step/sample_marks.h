// Why a row of logits has no token: negative numbers in the token's place, by which a row's error
// stays its own and reaches the host with the tokens of the others.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/status.h"
#include "plan/integers/token_marks.h"

namespace marlin {

/// Tokens of a vocabulary, at most: marks have room for them.
inline constexpr int64_t kMostVocab = int64_t{1} << 29;

/// The error of a row whose sampled token is a mark; ok for a token and for kSkippedMark.
Status SampleError(int32_t token);

/// How many tokens there are before the first mark.
int64_t CountSampled(std::span<const int32_t> tokens);

/// The error of the first mark in `rows` rows of tokens, all of the same length.
Status FirstSampleError(std::span<const int32_t> tokens, int64_t rows);

}  // namespace marlin
