// Problems and devices for tests of plans, and invariants of the plans of every kernel.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "backends/cuda/plan/tile_problem.h"
#include "cards.h"

namespace marlin::cuda {

inline std::string Describe(const TileProblem& problem, const DeviceShape& device) {
  return "m " + std::to_string(problem.m) + ", n " + std::to_string(problem.n) + ", k " +
         std::to_string(problem.k) + ", tile " + std::to_string(problem.tile_bytes) +
         (problem.gated ? ", gated" : "") + (problem.batch_invariant ? ", invariant" : "") +
         ", multiprocessors " + std::to_string(device.multiprocessors);
}

/// The tile sizes of every code kind with every number of groups, with and without zeros.
inline std::vector<int> AllTileBytes() {
  std::vector<int> sizes;
  for (const CodeKind kind :
       {CodeKind::kFp4, CodeKind::kTable3, CodeKind::kTable2, CodeKind::kE4M3}) {
    for (const int groups : {1, 2, 4, 8}) {
      for (const int parameters : {1, 2}) {
        sizes.push_back(TileCodeBytes(CodeBits(kind)) + groups * kGroupBytes * parameters);
      }
    }
  }
  sizes.push_back(TileCodeBytes(CodeBits(CodeKind::kDense16)));
  return sizes;
}

/// Problems with log-uniform dimensions from 1 up, and with dimensions at and next to powers of
/// two.
inline std::vector<TileProblem> ManyProblems(int max_m, size_t count) {
  constexpr int kMaxLog = 17;
  std::mt19937 bits(20261121);
  const auto draw = [&bits](int largest) {
    const int log = static_cast<int>(bits() % (kMaxLog + 1));
    const int near = 1 << log;
    switch (bits() % 4) {
      case 0:
        return std::min(near, largest);
      case 1:
        return std::clamp(near + static_cast<int>(bits() % 3) - 1, 1, largest);
      default:
        return std::clamp(near + static_cast<int>(bits() % static_cast<uint32_t>(near)), 1,
                          largest);
    }
  };
  const std::vector<int> tile_bytes = AllTileBytes();
  std::vector<TileProblem> problems;
  for (size_t i = 0; i < count; ++i) {
    TileProblem problem;
    problem.m = 1 + static_cast<int>(bits() % static_cast<uint32_t>(max_m));
    problem.n = draw(200000);
    problem.k = draw(200000);
    problem.tile_bytes = tile_bytes[i % tile_bytes.size()];
    problem.gated = problem.n % 2 == 0 && bits() % 4 == 0;
    problem.pair_table = bits() % 4 == 0;
    problem.narrow_codes = problem.tile_bytes == TileCodeBytes(4) + kGroupBytes;
    problem.batch_invariant = bits() % 4 == 0;
    problems.push_back(problem);
  }
  return problems;
}

inline std::vector<DeviceShape> Devices() {
  std::vector<DeviceShape> devices(4);  // An H200, smaller devices, and a larger one.
  devices[1].multiprocessors = 114;
  devices[2].multiprocessors = 16;
  devices[3].multiprocessors = 200;
  for (size_t i = 1; i < devices.size(); ++i) {
    for (int blocks = 1; blocks <= kMaxSplits; ++blocks) {
      devices[i].clusters[blocks - 1] = devices[i].multiprocessors / blocks;
    }
  }
  return devices;
}

/// Both these and the cards.
inline std::vector<DeviceShape> DevicesAndCards() {
  std::vector<DeviceShape> devices = Devices();
  for (const Card& card : Cards()) devices.push_back(card.shape);
  return devices;
}

/// Splits of `part` tiles each cover `tiles` once, and none of them is empty.
inline void ExpectSplitsCover(int tiles, int part, int splits) {
  EXPECT_GE(part, 1);
  EXPECT_GE(int64_t{part} * splits, tiles);
  EXPECT_LT(int64_t{part} * (splits - 1), tiles);
}

/// Regions of shared memory follow one another, aligned for what lies in them.
struct Regions {
  int64_t end = 0;
  void Add(const char* name, int64_t begin, int64_t bytes, int64_t alignment) {
    EXPECT_GE(begin, end) << name;
    EXPECT_EQ(begin % alignment, 0) << name;
    end = begin + bytes;
  }
};

inline TileProblem Fp4Problem(int m, int n, int k) {
  TileProblem problem = {.m = m, .n = n, .k = k, .tile_bytes = TileCodeBytes(4) + kGroupBytes};
  problem.narrow_codes = true;
  return problem;
}

}  // namespace marlin::cuda
