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

  /// Errors: kNonFiniteInput naming the token whose logit is NaN.
  Result<int32_t> Draw(std::span<const float> logits);

 private:
  /// A number in [0, 1) with 53 random bits.
  double Uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

  SamplingOptions options_;
  std::mt19937_64 random_;
  std::vector<int32_t> order_;
  std::vector<double> weights_;
};

}  // namespace marlin
