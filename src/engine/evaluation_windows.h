// The windows in which a text is evaluated.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/evaluate.h"
#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin {

/// One window: feeds tokens [first, first + count) and scores the targets from `scored` on.
struct Window {
  int64_t first;
  int64_t count;
  int64_t scored;  ///< Index in the window.
};

/// Errors: as Perplexity, except for token ids.
Status CheckEvaluation(const Model& model, std::span<const int32_t> tokens,
                       const EvaluateOptions& options);
/// Errors: kInvalidArgument for a token id out of range.
Status CheckTargets(const Model& model, std::span<const int32_t> tokens);

/// The windows of a text of `tokens` tokens.
std::vector<Window> EvaluationWindows(int64_t tokens, const EvaluateOptions& options);

/// The rows of logits of a model that are in memory at once, at most.
int64_t MostEvaluatedRows(const Model& model);

}  // namespace marlin
