// Generation as a GGUF file describes it: the tokens that end it, and how tokens are sampled.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/readers/gguf_file.h"

namespace marlin {

/// Whether programs take a token of this text for the end of a turn or a text, whatever the
/// metadata say about it.
bool IsGgufEndText(std::string_view token);

/// The tokens that end generation: those that the metadata name (end of text, turn and message),
/// that of the end of a text first, and those whose text says so, in the order of their ids.
std::vector<int64_t> GgufEndTokens(const GgufMetadata& metadata);

/// generation_config.json with the sampling that the metadata recommend; empty if they do not.
std::string GgufGenerationConfig(const GgufMetadata& metadata);

}  // namespace marlin
