// The program's own random numbers: the same on every machine and standard library.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

namespace marlin::conformance {

/// FNV-1a of a text, for seeds made from names.
inline uint64_t HashText(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

/// SplitMix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// Uniform in [low, high], both included.
  int64_t Integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Next() % static_cast<uint64_t>(high - low + 1));
  }
  bool OneIn(int64_t count) { return Integer(1, count) == 1; }
  /// Uniform in (0, 1).
  double Uniform() { return (static_cast<double>(Next() >> 11) + 0.5) * 0x1p-53; }
  double Gaussian() {
    return std::sqrt(-2.0 * std::log(Uniform())) * std::cos(6.283185307179586 * Uniform());
  }

 private:
  uint64_t state_;
};

}  // namespace marlin::conformance
