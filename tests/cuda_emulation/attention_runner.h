// Runs attention kernels in the emulation, for the tests of each.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "../unit/backends/cuda/attention_problem.h"
#include "../unit/backends/cuda/cards.h"
#include "backends/cuda/attention/attention_launch.h"
#include "backends/cuda/common/device_code.cuh"
#include "cuda_emulation/emulate.h"

namespace cuda_emulation {

/// Whether a case is run: code of 10.0 differs from code of 8.0 in conversions of codes and in bulk
/// copies.
inline bool IsRun(bool fp8, bool bulk_copies = false) {
  return fp8 || bulk_copies || !marlin::cuda::kHasTma;
}

/// Results in memory that begins as NaN.
inline std::vector<float> RunAttention(
    const marlin::cuda::AttentionProblem& problem, const marlin::cuda::AttentionPlan& plan,
    const marlin::cuda::DeviceShape& device,
    cudaError_t (*launch)(const marlin::cuda::AttentionArguments&, const marlin::cuda::DeviceShape&,
                          cudaStream_t),
    bool counts = false) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  std::vector<uint8_t> cache = problem.CacheBytes();
  std::vector<uint8_t> queries = problem.QueryBytes();
  std::vector<float> out(static_cast<size_t>(problem.OutElements()), kNaN);
  std::vector<float> partials(static_cast<size_t>(plan.partial_bytes) / sizeof(float) + 4, kNaN);
  std::vector<uint32_t> counters(static_cast<size_t>(plan.tiles * problem.of.kv_heads), ~0U);
  marlin::cuda::ValueRecord record;
  int any = 0;
  marlin::cuda::AttentionArguments args = problem.Arguments(
      {cache.data(), queries.data(), problem.positions.data(), problem.first_rows.data(),
       problem.tables.data(), problem.sinks.data(), out.data()});
  args.tile_rows = plan.tile_rows;
  args.tiles = static_cast<int>(plan.tiles);
  args.segments = static_cast<int>(plan.segments);
  args.partials = partials.data();
  if (counts) args.counters = counters.data();
  args.errors = {&record, &any};
  EXPECT_EQ(launch(args, device, nullptr), cudaSuccess);
  EXPECT_EQ(TakeFindings(), "");
  EXPECT_EQ(any, 0);
  EXPECT_TRUE(std::ranges::all_of(counters, [](uint32_t count) { return count == ~0U; }));
  return out;
}

inline void ExpectNear(const std::vector<float>& actual, const std::vector<double>& expected,
                       double bound = 2e-4) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) ASSERT_NEAR(actual[i], expected[i], bound) << i;
}

}  // namespace cuda_emulation
