// A rounding oracle that shares no code with the library: the sorted values of a format, and a walk
// over floats in ascending order that advances along them by comparing with exact midpoints.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "../source_directory.h"

namespace marlin::test {

/// One representable value and the code that encoders must give for it.
struct GridPoint {
  double value;
  uint32_t code;
};

/// Values in ascending order. Floats beyond the ends round to the ends.
using ValueGrid = std::vector<GridPoint>;

/// Makes a grid from a code table without NaN and Inf codes; of codes with equal values (0 and -0)
/// the lowest is kept.
inline ValueGrid MakeGrid(const std::vector<double>& values) {
  ValueGrid grid;
  for (size_t code = 0; code < values.size(); ++code) {
    if (std::isfinite(values[code])) grid.push_back({values[code], static_cast<uint32_t>(code)});
  }
  std::stable_sort(grid.begin(), grid.end(),
                   [](const GridPoint& a, const GridPoint& b) { return a.value < b.value; });
  const auto equal = [](const GridPoint& a, const GridPoint& b) { return a.value == b.value; };
  grid.erase(std::unique(grid.begin(), grid.end(), equal), grid.end());
  return grid;
}

/// tests/golden/format_values.txt: name -> value of every code.
inline std::map<std::string, std::vector<double>> GoldenValues() {
  std::ifstream file(SourceDirectory() + "/tests/golden/format_values.txt");
  std::map<std::string, std::vector<double>> table;
  std::string name, code, value;
  while (file >> name >> code >> value) table[name].push_back(std::strtod(value.c_str(), nullptr));
  return table;
}

/// The values of bf16 and fp16 by their definition; infinity is replaced by the next value of the
/// grid, so that the overflow threshold is one more midpoint.
inline std::vector<double> SixteenBitValues(int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t infinity = ((1u << exponent_bits) - 1u) << fraction_bits;
  std::vector<double> values(0x10000, std::numeric_limits<double>::quiet_NaN());
  for (uint32_t code = 0; code <= infinity; ++code) {
    const int exponent = static_cast<int>(code >> fraction_bits);
    const double fraction = std::ldexp(code & ((1u << fraction_bits) - 1u), -fraction_bits);
    const double value =
        exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
    values[code] = value;
    values[code | 0x8000u] = -value;
  }
  return values;
}

/// Walks a grid: Nearest() must be called with ascending numbers.
class GridWalk {
 public:
  explicit GridWalk(const ValueGrid& grid) : grid_(grid) {}

  /// Returns the code of the nearest value, on a tie the even code. Midpoints of grids of floats
  /// are exact in double.
  uint32_t Nearest(double x) {
    while (at_ + 1 < grid_.size() && StepsUp(x)) ++at_;
    return grid_[at_].code;
  }

 private:
  bool StepsUp(double x) const {
    const double middle = (grid_[at_].value + grid_[at_ + 1].value) / 2;
    return x > middle || (x == middle && grid_[at_ + 1].code % 2 == 0);
  }

  const ValueGrid& grid_;
  size_t at_ = 0;
};

/// Whether to try all floats (MARLIN_EXHAUSTIVE=full) rather than a subset.
inline bool AllFloats() {
  const char* mode = std::getenv("MARLIN_EXHAUSTIVE");
  return mode != nullptr && std::string(mode) == "full";
}

/// The subset: every upper half with a few lower halves, and the neighbourhood of every midpoint.
inline std::vector<float> SampledFloats(const ValueGrid& grid) {
  std::set<float> floats;
  for (uint32_t upper = 0; upper < 0x10000u; ++upper) {
    for (const uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float x = std::bit_cast<float>(upper << 16 | lower);
      if (!std::isnan(x)) floats.insert(x);
    }
  }
  for (size_t i = 0; i + 1 < grid.size(); ++i) {
    float below = static_cast<float>((grid[i].value + grid[i + 1].value) / 2);
    for (int step = 0; step < 3; ++step) below = std::nextafterf(below, -INFINITY);
    for (int step = 0; step < 7; ++step) {
      floats.insert(below);
      below = std::nextafterf(below, INFINITY);
    }
  }
  return {floats.begin(), floats.end()};
}

/// Calls body(x) for floats in ascending order, -0 just before 0 in full mode: all except NaN, or
/// the grid's sample.
template <typename Body>
void ForEachFloatAscending(const ValueGrid& grid, Body body) {
  if (!AllFloats()) {
    for (float x : SampledFloats(grid)) body(x);
    return;
  }
  for (uint32_t bits = 0xff800000u; bits >= 0x80000000u; --bits) body(std::bit_cast<float>(bits));
  for (uint32_t bits = 0; bits <= 0x7f800000u; ++bits) body(std::bit_cast<float>(bits));
}

/// Counts mismatches and keeps the first.
class Mismatches {
 public:
  void Check(float x, uint32_t got, uint32_t expected) {
    ++checked_;
    if (got == expected) return;
    if (count_++ == 0) {
      first_ = "x=" + std::to_string(x) + " bits " + std::to_string(std::bit_cast<uint32_t>(x)) +
               ": got " + std::to_string(got) + ", expected " + std::to_string(expected);
    }
  }
  int64_t count() const { return count_; }
  int64_t checked() const { return checked_; }
  const std::string& first() const { return first_; }

 private:
  int64_t count_ = 0;
  int64_t checked_ = 0;
  std::string first_;
};

}  // namespace marlin::test
