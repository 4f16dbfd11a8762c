// The random choices of a simulation: the same everywhere for the same seed.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/split_mix64.h"

namespace marlin::metal::simulator {

class RandomSource {
 public:
  explicit RandomSource(uint64_t seed) : numbers_(seed) {}

  /// Below `bound`, which must not be 0; the bias of the remainder is of no consequence here.
  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>((numbers_.Next() >> 32) % bound); }

  /// How many trials it takes to succeed once, at most `most`, each with `probability` in (0, 1].
  uint32_t TrialsUntilSuccess(double probability, uint32_t most) {
    if (probability >= 1) return 1;
    const double trials = 1 + std::floor(std::log(numbers_.Uniform()) / std::log1p(-probability));
    return trials < most ? static_cast<uint32_t>(trials) : most;
  }

 private:
  SplitMix64 numbers_;
};

}  // namespace marlin::metal::simulator
