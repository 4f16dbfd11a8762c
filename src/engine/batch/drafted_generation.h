// Generate with speculation: a continuous batch of one text.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin {

/// Checked arguments of Generate, whose options ask for speculation. `sequence`: null, or one that
/// has the beginning of the prompt. Errors: as Generate; kInvalidArgument for a sequence of another
/// model or in use.
Result<Generated> GenerateDrafted(const Model& model, Sequence* sequence,
                                  std::span<const int32_t> prompt, const GenerateOptions& options,
                                  const TokenCallback& callback);

}  // namespace marlin
