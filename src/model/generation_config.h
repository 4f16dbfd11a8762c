// How a model wants to be run: its end tokens, and how its tokens are sampled.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/sampling.h"
#include "marlin/status.h"
#include "recipe/model_config.h"

namespace marlin {

/// The texts of the files next to a config.json that say so; empty: there is no such file.
struct GenerationFiles {
  std::string generation_config;
  std::string tokenizer_config;
  std::string tokenizer;
};

struct GenerationDefaults {
  /// The ids of all files together.
  std::vector<int32_t> eos_token_ids;
  /// Greedy unless the files ask for samples.
  SamplingOptions sampling;
  /// Keys of generation_config.json that would change the text and are not applied.
  std::vector<std::string> ignored;
};

/// Errors: kMalformedFile naming the file and the key.
Result<GenerationDefaults> ReadGenerationDefaults(ModelConfig& config,
                                                  const GenerationFiles& files);

}  // namespace marlin
