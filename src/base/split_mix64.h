// A random number generator that gives the same sequence on every machine and standard library.
#pragma once

#include <cstdint>

namespace marlin {

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
  /// Uniform in (0, 1), both ends excluded.
  double Uniform() { return (static_cast<double>(Next() >> 11) + 0.5) * 0x1p-53; }

 private:
  uint64_t state_;
};

}  // namespace marlin
