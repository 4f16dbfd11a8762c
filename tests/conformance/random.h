// Random numbers that are the same on every machine and standard library.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

#include "base/split_mix64.h"

namespace marlin::conformance {

/// FNV-1a of a text, for seeds derived from names.
inline uint64_t HashText(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

class Random {
 public:
  explicit Random(uint64_t seed) : numbers_(seed) {}

  uint64_t Next() { return numbers_.Next(); }
  /// Uniform in [low, high], both included.
  int64_t Integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Next() % static_cast<uint64_t>(high - low + 1));
  }
  bool OneIn(int64_t count) { return Integer(1, count) == 1; }
  /// Uniform in (0, 1).
  double Uniform() { return numbers_.Uniform(); }
  double Gaussian() {
    return std::sqrt(-2.0 * std::log(Uniform())) * std::cos(6.283185307179586 * Uniform());
  }

 private:
  SplitMix64 numbers_;
};

}  // namespace marlin::conformance
