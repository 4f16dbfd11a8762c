// RoPE frequencies: plain, and extended to longer contexts.
#pragma once

#include <cstdint>
#include <vector>

#include "recipe/rope_parameters.h"

namespace marlin {

struct Rotary {
  std::vector<float> inverse_frequencies;  ///< One per rotated pair.
  float attention_factor = 1.0F;
  /// DeepSeek's correction of the attention scale, already squared.
  float score_factor = 1.0F;
};

int64_t RotatedPairs(const RopeParameters& rope, int64_t head_dim);
/// The frequencies of heads of `head_dim`, of which the parameters may rotate only a part.
/// Precondition: pair_factors, if any, are one per rotated pair (RotatedPairs).
Rotary MakeRotary(const RopeParameters& rope, int64_t head_dim);

}  // namespace marlin
