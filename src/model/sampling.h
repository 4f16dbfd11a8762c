// Drawing a token from logits.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "marlin/generate.h"
#include "marlin/status.h"

namespace marlin {

/// Errors: kInvalidArgument naming the option out of range.
Status CheckSampling(const SamplingOptions& options);

/// Draws tokens one after the other; the same seed and logits give the same tokens everywhere.
class Sampler {
 public:
  /// Precondition: CheckSampling.
  explicit Sampler(const SamplingOptions& options) : options_(options), random_(options.seed) {}

  /// Errors: kNonFiniteInput naming the token whose logit is NaN or infinite. Minus infinity is a
  /// token that cannot be, unless every one is.
  Result<int32_t> Draw(std::span<const float> logits);

 private:
  /// A number in [0, 1) with 53 random bits.
  double Uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
  double WeightAt(size_t place) const { return weights_[static_cast<size_t>(order_[place])]; }
  /// Puts the `count` most likely tokens in front of order_, equals by their numbers.
  void SortFirst(std::span<const float> logits, size_t count);
  /// How many of the first tokens of order_ remain.
  size_t KeepTopK(std::span<const float> logits);
  size_t CountNucleus(std::span<const float> logits, size_t kept);

  SamplingOptions options_;
  std::mt19937_64 random_;
  std::vector<int32_t> order_;   ///< Tokens; the first sorted_ are the most likely ones, in order.
  std::vector<double> weights_;  ///< Of each token, relative to the most likely one's.
  size_t sorted_ = 0;
};

}  // namespace marlin
