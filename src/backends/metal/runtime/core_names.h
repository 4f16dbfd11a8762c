// GPU cores by the name of a chip, where no system can be asked for their number.
#pragma once

#include <string_view>
#include <utility>

namespace marlin::metal {

/// The highest GPU core count that each chip is sold with, from Apple's specifications.
inline constexpr std::pair<std::string_view, int> kMostCores[] = {
    {"Apple M1", 8},  {"Apple M1 Pro", 16}, {"Apple M1 Max", 32}, {"Apple M1 Ultra", 64},
    {"Apple M2", 10}, {"Apple M2 Pro", 19}, {"Apple M2 Max", 38}, {"Apple M2 Ultra", 76},
    {"Apple M3", 10}, {"Apple M3 Pro", 18}, {"Apple M3 Max", 40}, {"Apple M3 Ultra", 80},
    {"Apple M4", 10}, {"Apple M4 Pro", 20}, {"Apple M4 Max", 40}, {"Apple M5", 10},
};

/// 0: the name is unknown.
constexpr int MostCoresOf(std::string_view name) {
  for (const auto& [chip, most] : kMostCores) {
    if (chip == name) return most;
  }
  return 0;
}

}  // namespace marlin::metal
