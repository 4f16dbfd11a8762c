// The JSON documents that a command and the Python package share: --json prints them, and the
// package makes objects of them.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "marlin/checkpoint.h"
#include "marlin/evaluate.h"
#include "marlin/generate.h"
#include "marlin/prepared.h"
#include "marlin/recipe.h"

namespace marlin::cli {

/// The document of `perplexity`.
nlohmann::ordered_json PerplexityDocument(const PerplexityResult& result);

/// The document of `compare`.
nlohmann::ordered_json ComparisonDocument(const CompareResult& result);

/// The document of `prepare`.
nlohmann::ordered_json PreparedDocument(const PrepareModelReport& report);

/// The document of `generate`. `text` may be null; `reason` says why generation ended; `sampling`:
/// how its tokens were chosen.
nlohmann::ordered_json GeneratedDocument(const nlohmann::ordered_json& text,
                                         std::string_view reason, const Generated& generated,
                                         size_t prompt_tokens, const SamplingOptions& sampling);

/// The sampling options that a generation_config.json can ask for.
nlohmann::ordered_json SamplingDocument(const SamplingOptions& sampling);

/// Tokens per second after the first.
double DecodeRate(const Generated& generated);

/// The document of `quantize`, without what --target-bpw adds.
nlohmann::ordered_json QuantizedDocument(const QuantizeCheckpointReport& report,
                                         const QuantizeCheckpointOptions& options);

}  // namespace marlin::cli
