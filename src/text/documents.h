// The JSON documents that a command and the Python package share: --json prints them, and the
// package makes objects of them.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>
#include <vector>

#include "marlin/checkpoint.h"
#include "marlin/draft.h"
#include "marlin/evaluate.h"
#include "marlin/generate.h"
#include "marlin/model_ends.h"
#include "marlin/prepared.h"
#include "marlin/recipe.h"

namespace marlin {

/// The document of `perplexity`.
nlohmann::ordered_json PerplexityDocument(const PerplexityResult& result);

/// The document of `compare`.
nlohmann::ordered_json ComparisonDocument(const CompareResult& result);

/// The array of `compare --draft`.
nlohmann::ordered_json AcceptanceDocument(const AcceptanceResult& result);

/// The document of `prepare`.
nlohmann::ordered_json PreparedDocument(const PrepareModelReport& report);

/// The document of `generate`. `text` may be null; `reason` says why generation ended; `sampling`:
/// how its tokens were chosen.
nlohmann::ordered_json GeneratedDocument(const nlohmann::ordered_json& text,
                                         std::string_view reason, const Generated& generated,
                                         size_t prompt_tokens, const SamplingOptions& sampling);

/// The guesses of a text, or of several.
nlohmann::ordered_json DraftsDocument(const DraftCounts& drafts);

/// The sampling options that a generation_config.json can ask for.
nlohmann::ordered_json SamplingDocument(const SamplingOptions& sampling);

/// Tokens per second after the first.
double DecodeRate(const Generated& generated);

/// Tensors or files with a reason, as an array of {"name", "reason"}.
nlohmann::ordered_json SkippedJson(const std::vector<SkippedTensor>& skipped);

/// {"embedding": {"format", "bits_per_weight"}, "head": the same, "tied"}; null for a matrix that a
/// model does not have.
nlohmann::ordered_json EndsDocument(const ModelEnds& ends);

/// The document of `quantize`, without what --target-bpw adds.
nlohmann::ordered_json QuantizedDocument(const QuantizeCheckpointReport& report,
                                         const QuantizeCheckpointOptions& options);

}  // namespace marlin
