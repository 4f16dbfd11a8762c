// Runs the models of the demo.
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

/// Perplexity, speed and sample text of one model.
struct ModelResult {
  PerplexityResult perplexity;
  double tokens_per_second = 0;  ///< Decoding speed, the fastest of five runs.
  std::string sentence;          ///< Empty without a tokenizer.
};

/// The token ids next to a sample model; empty if there are none. Errors: as ReadTokens.
Result<std::vector<int32_t>> ReadSampleTokens(const std::string& model);

/// Evaluates a model on held-out tokens, and lets it continue their beginning. Errors: as
/// Model::Open, Perplexity, Generate and the tokenizer.
Result<ModelResult> RunDemoModel(const Console& console, const Device& device,
                                 const std::string& path, std::span<const int32_t> tokens);

}  // namespace marlin::cli
