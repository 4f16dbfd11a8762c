// Plans of the router's product: every part of k has its tiles, and shared memory has room.
#include "backends/cuda/moe/router/router_plan.h"

#include <gtest/gtest.h>

#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda::router_plan_test {
namespace {

constexpr int kShared = DeviceShape().shared_bytes;

TEST(RouterPlan, PartsCoverEveryTile) {
  for (const int hidden : {4, 96, 128, 1024, 1028, 2048, 2880, 4096, 5120, 7168, 16384}) {
    for (const int experts : {1, 8, 60, 64, 128, 160, 256, 384, 512}) {
      const auto plan = PlanRouter({hidden, experts}, kShared);
      if (!plan.has_value()) {
        EXPECT_GT(hidden * experts, 16000 * 256) << hidden << " x " << experts;
        continue;
      }
      EXPECT_GE(plan->k_tiles * kTileK, hidden);
      EXPECT_LT((plan->k_tiles - 1) * kTileK, hidden);
      EXPECT_GE(plan->tiles_of_part * kRouterParts, plan->k_tiles);
      EXPECT_GE(plan->strips * kStripOutputs, experts);
      EXPECT_GE(plan->sum_stride, experts);
      EXPECT_GE(plan->slots, 1);
      EXPECT_LE(plan->slots, plan->tiles_of_part);
      EXPECT_LE(plan->total_bytes, kShared);
      const int weights = plan->slots * plan->strips * kDenseTileBytes;
      EXPECT_GE(plan->total_bytes - weights, plan->barriers + (plan->slots + 1) * kBarrierBytes);
      EXPECT_EQ((plan->total_bytes - weights) % 128, 0);
    }
  }
}

TEST(RouterPlan, KeepsTheWeightsOfAPartWhereTheyFit) {
  EXPECT_EQ(PlanRouter({2048, 128}, kShared)->slots, 2);
  EXPECT_EQ(PlanRouter({4096, 128}, kShared)->slots, 4);
  const auto wide = PlanRouter({7168, 256}, kShared);
  EXPECT_EQ(wide->tiles_of_part, 7);
  EXPECT_EQ(wide->slots, 2);
}

TEST(RouterPlan, RefusesOtherShapes) {
  EXPECT_FALSE(PlanRouter({0, 8}, kShared).has_value());
  EXPECT_FALSE(PlanRouter({2050, 8}, kShared).has_value());
  EXPECT_FALSE(PlanRouter({2048, 0}, kShared).has_value());
  EXPECT_FALSE(PlanRouter({2048, kMostTeamExperts + 1}, kShared).has_value());
  EXPECT_FALSE(PlanRouter({1 << 30, 8}, kShared).has_value());
  EXPECT_FALSE(PlanRouter({2048, 512}, 64 * 1024).has_value());
}

}  // namespace
}  // namespace marlin::cuda::router_plan_test
