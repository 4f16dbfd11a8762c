// Plans that are remembered are those that would be made.
#include "backends/cuda/plan_cache.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace marlin::cuda {
namespace {

TileProblem Problem(int m, int n) {
  return {.m = m, .n = n, .k = 4096, .tile_bytes = TileCodeBytes(4) + kGroupBytes};
}

bool Same(const GemvPlan& a, const GemvPlan& b) {
  return a.splits == b.splits && a.groups == b.groups && a.warps == b.warps &&
         a.strips == b.strips && a.shared_bytes == b.shared_bytes && a.partials == b.partials &&
         a.in_memory == b.in_memory && a.arguments.m == b.arguments.m &&
         a.arguments.units_base == b.arguments.units_base &&
         a.arguments.units_rest == b.arguments.units_rest;
}

TEST(PlanCache, AreThoseOfTheProblem) {
  const DeviceShape device;
  PlanCache plans;
  for (int round = 0; round < 2; ++round) {
    for (int m = 1; m <= kMaxGemvRows; ++m) {
      for (const int n : {32, 4096, 14336}) {
        TileProblem problem = Problem(m, n);
        EXPECT_TRUE(Same(plans.Of(problem, device), PlanGemv(problem, device)));
        // What differs in one thing alone is another problem.
        problem.gated = true;
        EXPECT_TRUE(Same(plans.Of(problem, device), PlanGemv(problem, device)));
        EXPECT_TRUE(plans.Of(problem, device).partials);
      }
    }
  }
}

TEST(PlanCache, RemembersWhichKernelTakesLess) {
  const DeviceShape device;
  PlanCache plans;
  for (int round = 0; round < 2; ++round) {
    for (int m = 1; m <= kMaxGemvRows; ++m) {
      for (const int n : {4096, 9216}) {
        TileProblem problem = Problem(m, n);
        problem.narrow_codes = true;
        EXPECT_EQ(plans.WgmmaTakesLess(problem, device), m > 8 && n == 9216) << m;
        EXPECT_TRUE(Same(plans.Of(problem, device), PlanGemv(problem, device)));
      }
    }
  }
}

TEST(PlanCache, ForgetsWhatIsTooMuch) {
  const DeviceShape device;
  PlanCache plans;
  for (size_t i = 0; i < PlanCache::kMost + 10; ++i) {
    const TileProblem problem = Problem(1, 32 * static_cast<int>(i + 1));
    plans.Of(problem, device);
  }
  const TileProblem first = Problem(1, 32);
  EXPECT_TRUE(Same(plans.Of(first, device), PlanGemv(first, device)));
}

TEST(PlanCache, ServesThreadsAtOnce) {
  const DeviceShape device;
  PlanCache plans;
  std::vector<std::thread> threads;
  std::vector<char> good(8, 0);
  for (size_t t = 0; t < good.size(); ++t) {
    threads.emplace_back([&, t] {
      bool all = true;
      for (int i = 0; i < 200; ++i) {
        const TileProblem problem = Problem(1 + i % kMaxGemvRows, 32 * (1 + i / 3));
        all = all && Same(plans.Of(problem, device), PlanGemv(problem, device));
      }
      good[t] = all ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const char each : good) EXPECT_EQ(each, 1);
}

}  // namespace
}  // namespace marlin::cuda
