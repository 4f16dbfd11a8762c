// Perplexity of a model, and KL divergence between two models.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "marlin/model.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// The text is evaluated in windows that start every `stride` tokens; window w feeds tokens
/// [w * stride, w * stride + window) to an empty sequence and predicts the token after each. An
/// incomplete last window (counting its last target) is dropped, unless it is the only one.
struct EvaluateOptions {
  int64_t window = 256;
  int64_t stride = 0;       ///< 0: the window. If smaller, only the last `stride` targets of each
                            ///< window count, except in the first, where all do.
  int64_t max_windows = 0;  ///< 0: all.
  std::function<void(int64_t done, int64_t total)> progress = {};  ///< In windows.
};

/// The perplexity of a model on a text.
struct PerplexityResult {
  double perplexity = 0;
  double nll = 0;             ///< Mean negative log likelihood, nats per token.
  double standard_error = 0;  ///< Perplexity times the standard error of nll.
  int64_t tokens = 0;         ///< Predictions counted.
  int64_t windows = 0;
};

/// Computes the perplexity of a tokenized text. Errors: kInvalidArgument for fewer than two tokens,
/// a window past the model's context, a token id out of range.
Result<PerplexityResult> Perplexity(const Model& model, std::span<const int32_t> tokens,
                                    const EvaluateOptions& options = {});

/// The model against the reference; kl_* is KL(reference || model) per predicted token, in nats.
struct CompareResult {
  PerplexityResult model;
  PerplexityResult reference;
  double perplexity_ratio = 0;  ///< The model's over the reference's.
  /// Standard error of the ratio: much smaller than the errors of the two perplexities, because
  /// both models predict the same tokens.
  double perplexity_ratio_error = 0;
  double kl_mean = 0;
  double kl_median = 0;
  double kl_p99 = 0;
  double kl_max = 0;
  double top1_agreement = 0;  ///< Fraction of positions with the same most likely token.
};

/// Evaluates both models on the same windows. Errors: as Perplexity, and kInvalidArgument
/// when the vocabularies differ.
Result<CompareResult> CompareModels(const Model& model, const Model& reference,
                                    std::span<const int32_t> tokens,
                                    const EvaluateOptions& options = {});

}  // namespace marlin
#pragma GCC visibility pop
