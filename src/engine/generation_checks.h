// Checks of prompts and options of generation.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin {

/// Errors: kInvalidArgument naming the option out of range; as CheckSpeculation.
Status CheckGenerateOptions(const Model& model, const GenerateOptions& options);

/// Errors: kInvalidArgument, which calls the prompt `name`, for one without tokens, one that
/// exceeds the context and a token id out of range.
Status CheckPrompt(std::string_view name, const Model& model, std::span<const int32_t> prompt);

/// The tokens that end a text; valid as long as model and options.
std::span<const int32_t> StopTokens(const Model& model, const GenerateOptions& options);

}  // namespace marlin
