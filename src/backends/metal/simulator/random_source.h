// The random choices of a simulation: the same everywhere for the same seed.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/split_mix64.h"

namespace marlin::metal::simulator {

class RandomSource {
 public:
  /// `probability`, 0 to 1, is that of TrialsUntilSuccess.
  explicit RandomSource(uint64_t seed, double probability = 1)
      : numbers_(seed), scale_(1 / std::log1p(-probability)) {}

  /// Below `bound`, which must not be 0; the bias is of no consequence here.
  uint32_t Below(uint32_t bound) {
    return static_cast<uint32_t>((numbers_.Next() >> 32) * bound >> 32);
  }

  /// How many trials it takes to succeed once, at most `most`. Precondition: can succeed.
  uint32_t TrialsUntilSuccess(uint32_t most) {
    // log1p(-1) is minus infinity: the first trial succeeds.
    const double trials = 1 + std::floor(std::log(numbers_.Uniform()) * scale_);
    return trials < most ? static_cast<uint32_t>(trials) : most;
  }

 private:
  SplitMix64 numbers_;
  double scale_;
};

}  // namespace marlin::metal::simulator
