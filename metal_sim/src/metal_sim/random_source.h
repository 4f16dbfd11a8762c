// The random choices of a simulation: the same everywhere for the same seed.
#pragma once

#include <cmath>
#include <cstdint>

namespace metal_sim {

/// SplitMix64. Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators"
/// (2014).
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    state_ += 0x9e3779b97f4a7c15U;
    uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9U;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebU;
    return mixed ^ (mixed >> 31);
  }
  /// In (0, 1), neither included.
  double Uniform() { return (static_cast<double>(Next() >> 11) + 0.5) * 0x1p-53; }

 private:
  uint64_t state_;
};

class RandomSource {
 public:
  /// `probability`, 0 to 1, is as in TrialsUntilSuccess.
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

}  // namespace metal_sim
