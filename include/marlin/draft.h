// The layer of a model that predicts further tokens (MTP), over a text: its logits, and how often
// its guesses are what the model says.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/evaluate.h"
#include "marlin/model.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

#pragma GCC visibility push(default)
namespace marlin {

/// The most guesses in a row that DraftLogits and MeasureAcceptance take.
inline constexpr int64_t kMostDraftDepth = 16;

/// Writes the layer's logits where every token is the text's own: row t is what it says of token
/// t + depth + 1, from the model's hidden state after token t and the tokens t + 1 to t + depth. At
/// depth 1 it follows the model, whose own guess is of token t + 1; at depth 2 it follows itself,
/// from its hidden state at depth 1, and so on. logits is host memory, f32 [tokens.size() - depth,
/// vocab_size] with contiguous rows. Errors: kInvalidArgument for a model opened without
/// ModelOptions::draft, a depth that is not in 1..kMostDraftDepth or not less than the number of
/// tokens, and as Model::Forward.
Status DraftLogits(const Model& model, std::span<const int32_t> tokens, int64_t depth,
                   const MutableTensorView& logits);

/// Guesses of one depth.
struct DepthAcceptance {
  int64_t positions = 0;  ///< Guesses that were compared.
  double accepted = 0;    ///< Fraction of them that are the model's most likely token.
};

/// How often a model's layer that predicts further tokens guesses what the model says.
struct AcceptanceResult {
  std::vector<DepthAcceptance> depths;  ///< From depth 1 on.
  int64_t windows = 0;
};

/// Compares the most likely token of DraftLogits, at every depth up to `depth`, with the model's
/// most likely token at the same position, over the windows of a text. Every guess follows the
/// text's own tokens, whether or not the guesses before it are right. Errors: as DraftLogits and
/// Perplexity; kInvalidArgument for windows without a position of that depth.
Result<AcceptanceResult> MeasureAcceptance(const Model& model, std::span<const int32_t> tokens,
                                           int64_t depth, const EvaluateOptions& options = {});

}  // namespace marlin
#pragma GCC visibility pop
