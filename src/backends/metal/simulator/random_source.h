// Random numbers that are the same everywhere for the same seed (SplitMix64).
#pragma once

#include <cmath>
#include <cstdint>

namespace marlin::metal::simulator {

class RandomSource {
 public:
  explicit RandomSource(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    state_ += 0x9e3779b97f4a7c15U;
    uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9U;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebU;
    return mixed ^ (mixed >> 31);
  }

  /// Below `bound`, which must not be 0; the bias of the remainder is of no consequence here.
  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>((Next() >> 32) % bound); }

  /// How many trials it takes to succeed once, at most `most`, each with `probability` in (0, 1].
  uint32_t TrialsUntilSuccess(double probability, uint32_t most) {
    if (probability >= 1) return 1;
    const double uniform = (static_cast<double>(Next() >> 11) + 0.5) * 0x1p-53;
    const double trials = 1 + std::floor(std::log(uniform) / std::log1p(-probability));
    return trials < most ? static_cast<uint32_t>(trials) : most;
  }

 private:
  uint64_t state_;
};

}  // namespace marlin::metal::simulator
