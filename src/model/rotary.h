// RoPE frequencies: plain, and extended to longer contexts.
#pragma once

#include <cstdint>
#include <vector>

#include "marlin/status.h"
#include "recipe/model_config.h"

namespace marlin {

struct Rotary {
  std::vector<float> inverse_frequencies;  ///< One per rotated pair.
  float attention_factor = 1.0F;
  /// DeepSeek's correction of the attention scale, already squared.
  float score_factor = 1.0F;
};

/// Reads rope_parameters, or rope_theta and rope_scaling, for heads of `head_dim`, of which the
/// config may rotate only a part. Types: default, linear, llama3, yarn. Errors: kUnsupported naming
/// another type, kMalformedFile naming the key.
Result<Rotary> ReadRotary(ModelConfig& config, int64_t head_dim, int64_t max_positions);

}  // namespace marlin
