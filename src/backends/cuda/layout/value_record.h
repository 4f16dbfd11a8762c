// Records of invalid values in device memory; of a kind, the one with the smallest key stays.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// Why a row of logits cannot be routed.
enum class LogitError : uint8_t { kNaNBias, kNaN, kInf, kNoFinite };

/// Wrong values of decoder operations; what the numbers of a record are, in order.
enum class ValueError : uint8_t {
  kNone,
  kIds,           ///< id, its place, the number of rows
  kPrompt,        ///< token, its place, the vocabulary
  kPosition,      ///< position, its place
  kNextPosition,  ///< position, its place, the one expected
  kFirstRows,     ///< value, its place, the number of rows
  kBlock,         ///< position, its block, the number of blocks
  kPage,          ///< page, block, sequence
  kMark,          ///< a mark of sample_marks.h, row or -1
  kSamplerState,  ///< row, vocabulary
  kLatentPage,    ///< page, its place
  kPageTokens,    ///< tokens, their place, the tokens of a page
  kStateRow,      ///< state, its place, the number of states
  kCount,         ///< tokens of a row, its place, the steps
  kStatePage,     ///< page, sequence
};

/// In device memory; of a kind, the first error stays.
struct ValueRecord {
  static constexpr unsigned long long kNone = ~0ULL;
  /// RouterKey of the first logit or bias, or kNone.
  unsigned long long router = kNone;
  /// Not 0: a selection is no expert; the fields below are valid.
  int bad_selection = 0;
  int token = 0;
  int selection = 0;
  int id = 0;
  int experts = 0;
  /// A ValueError, and the numbers of its message.
  int value_error = 0;
  int64_t numbers[3] = {};
};

/// How kernels record errors.
struct ErrorView {
  ValueRecord* record = nullptr;
  int* any = nullptr;  ///< Host memory; not 0: there is a record.
};

/// Orders errors by token, biases first, then by expert.
MARLIN_HOST_DEVICE constexpr unsigned long long RouterKey(LogitError error, int token, int expert) {
  const unsigned long long row =
      error == LogitError::kNaNBias ? 0 : static_cast<unsigned long long>(token) + 1;
  return row << 33 | static_cast<unsigned long long>(expert) << 2 |
         static_cast<unsigned long long>(error);
}

}  // namespace marlin::cuda
