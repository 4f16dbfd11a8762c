// The part of the demo that runs models.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cli/console.h"
#include "marlin/device.h"
#include "marlin/evaluate.h"
#include "marlin/status.h"

namespace marlin::cli {

/// How a model reads and writes.
struct ModelResult {
  PerplexityResult perplexity;
  double tokens_per_second = 0;  ///< Of decoding, the fastest of five texts.
  std::string sentence;          ///< Empty without a tokenizer.
};

/// The token ids that lie beside a sample model; empty where there are none. Errors: those of
/// ReadTokens.
Result<std::vector<int32_t>> ReadSampleTokens(const std::string& model);

/// Measures a model on tokens that it was not trained on, and lets it go on from their beginning.
/// Errors: those of Model::Open, Perplexity, Generate and the tokenizer.
Result<ModelResult> RunDemoModel(const Console& console, const Device& device,
                                 const std::string& path, std::span<const int32_t> tokens);

}  // namespace marlin::cli
