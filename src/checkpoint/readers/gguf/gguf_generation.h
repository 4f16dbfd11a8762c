// Generation as a GGUF file describes it: the tokens that end it, and how tokens are sampled.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/readers/gguf/gguf_file.h"

namespace marlin {

/// Whether programs take a token of this text for the end of a turn or a text, whatever the
/// metadata say about it.
bool IsGgufEndText(std::string_view token);

/// The tokens that end generation: those that the metadata name (end of text, turn and message),
/// the end of a text first, then tokens whose text says so, in the order of their ids.
std::vector<int64_t> GgufEndTokens(const GgufMetadata& metadata);

/// Keys of the sampling that a file recommends, and their names in generation_config.json.
inline constexpr std::pair<std::string_view, const char*> kGgufSamplingReals[] = {
    {"general.sampling.temp", "temperature"},
    {"general.sampling.top_p", "top_p"},
    {"general.sampling.min_p", "min_p"},
    {"general.sampling.penalty_repeat", "repetition_penalty"},
};
inline constexpr std::string_view kGgufTopK = "general.sampling.top_k";

/// generation_config.json with the sampling that the metadata recommend; empty if they do not.
std::string GgufGenerationConfig(const GgufMetadata& metadata);

}  // namespace marlin
