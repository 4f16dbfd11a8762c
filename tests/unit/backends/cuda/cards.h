// The devices that plans are for.
#pragma once

#include <vector>

#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

struct Card {
  const char* name;
  DeviceShape shape;
};

inline std::vector<Card> Cards() {
  constexpr int kKiB = 1024;
  const auto card = [](const char* name, int code, int multiprocessors, int shared_kib) {
    Card made{name, {}};
    made.shape.code = code;
    made.shape.has_wgmma = false;
    made.shape.multiprocessors = multiprocessors;
    made.shape.shared_bytes = shared_kib * kKiB;
    for (int blocks = 1; blocks <= kMaxSplits; ++blocks) {
      made.shape.clusters[blocks - 1] = code >= 90 ? multiprocessors / blocks : 0;
    }
    return made;
  };
  return {{"H200", {}},
          card("A100", 80, 108, 163),
          card("RTX 3090", 80, 82, 99),
          card("RTX 4060", 89, 24, 99),
          card("RTX 4090", 89, 128, 99),
          card("L40S", 89, 142, 99),
          card("H200 with code of 8.0", 80, 132, 227),
          card("B200", 100, 148, 227),
          card("RTX 5090", 120, 170, 99)};
}

}  // namespace marlin::cuda
