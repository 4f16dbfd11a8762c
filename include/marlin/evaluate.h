// How good a model is on a text, and how far one model is from another.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "marlin/model.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// The text is cut into windows that start every `stride` tokens; window w feeds tokens
/// [w * stride, w * stride + window) from an empty sequence and predicts the token after each.
/// A last window with fewer tokens (its last target included) is left out, unless it is the only.
struct EvaluateOptions {
  int64_t window = 256;
  int64_t stride = 0;       ///< 0: the window. Smaller: only the last `stride` targets count, but
                            ///< all of those of the first window.
  int64_t max_windows = 0;  ///< 0: all.
  std::function<void(int64_t done, int64_t total)> progress = {};  ///< Windows.
};

struct PerplexityResult {
  double perplexity = 0;
  double nll = 0;             ///< Mean negative log likelihood, nats per token.
  double standard_error = 0;  ///< Of perplexity: perplexity times the standard error of nll.
  int64_t tokens = 0;         ///< Predictions counted.
  int64_t windows = 0;
};

/// Errors: kInvalidArgument for fewer than two tokens, a window past the model's context, a token
/// id out of range.
Result<PerplexityResult> Perplexity(const Model& model, std::span<const int32_t> tokens,
                                    const EvaluateOptions& options = {});

/// KL divergence is KL(reference || model) per predicted token, in nats.
struct CompareResult {
  PerplexityResult model;
  PerplexityResult reference;
  double perplexity_ratio = 0;  ///< The model's over the reference's.
  /// Standard error of the ratio. Both predict the same tokens, so that it is much smaller than the
  /// errors of the two.
  double perplexity_ratio_error = 0;
  double kl_mean = 0;
  double kl_median = 0;
  double kl_p99 = 0;
  double kl_max = 0;
  double top1_agreement = 0;  ///< Fraction of positions whose most likely token is the same.
};

/// Errors: those of Perplexity, and kInvalidArgument when the vocabularies differ.
Result<CompareResult> CompareModels(const Model& model, const Model& reference,
                                    std::span<const int32_t> tokens,
                                    const EvaluateOptions& options = {});

}  // namespace marlin
#pragma GCC visibility pop
