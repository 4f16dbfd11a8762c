// The plan cache of prepared weights.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "plan/gemm/backend.h"

namespace marlin::plan_cache_test {
namespace {

constexpr KernelDesc kKernel = {};

class Plan final : public PlannedGemm {
 public:
  explicit Plan(int64_t m) : PlannedGemm(kKernel, {}, m) {}
  Status Run(const GemmCall& /*call*/) const override { return {}; }
};

GemmDesc Problem(int64_t m) {
  GemmDesc desc;
  desc.m = m;
  return desc;
}

TEST(PlanCache, FindsAPlanByItsProblemAndTheForcedKernel) {
  PlanCache plans;
  EXPECT_EQ(plans.Find(Problem(1), ""), nullptr);
  const auto one = std::make_shared<const Plan>(1);
  const auto named = std::make_shared<const Plan>(1);
  plans.Add(Problem(1), "", one);
  plans.Add(Problem(1), "named", named);
  EXPECT_EQ(plans.Find(Problem(1), ""), one);
  EXPECT_EQ(plans.Find(Problem(1), "named"), named);
  EXPECT_EQ(plans.Find(Problem(2), ""), nullptr);
  GemmDesc gated = Problem(1);
  gated.gated = true;
  EXPECT_EQ(plans.Find(gated, ""), nullptr);
}

TEST(PlanCache, ForgetsTheOldestPlanWhenItIsFull) {
  PlanCache plans;
  constexpr auto kMost = static_cast<int64_t>(PlanCache::kCapacity);
  for (int64_t m = 0; m < 3 * kMost; ++m) plans.Add(Problem(m), "", std::make_shared<Plan>(m));
  for (int64_t m = 0; m < 3 * kMost; ++m) {
    const auto found = plans.Find(Problem(m), "");
    ASSERT_EQ(found != nullptr, m >= 2 * kMost) << m;
    if (found == nullptr) continue;
    EXPECT_EQ(found->workspace_bytes(), m);
  }
}

TEST(PlanCache, ServesThreadsAtOnce) {
  PlanCache plans;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int64_t i = 0; i < 2000; ++i) {
        const int64_t m = i % 100;
        const auto found = plans.Find(Problem(m), "");
        if (found == nullptr) {
          plans.Add(Problem(m), "", std::make_shared<Plan>(m));
        } else if (found->workspace_bytes() != m) {
          ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace marlin::plan_cache_test
