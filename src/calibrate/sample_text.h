// Text that a model writes itself, for calibration without a text.
#pragma once

#include <cstdint>
#include <vector>

#include "marlin/model.h"

namespace marlin {

/// Samples `count` sequences of `length` tokens at temperature 1; each begins with a random token
/// of the vocabulary and does not end at end tokens. Errors: as Model::Decode.
Result<std::vector<std::vector<int32_t>>> SampleTexts(const Model& model, int64_t count,
                                                      int64_t length, uint64_t seed);

}  // namespace marlin
