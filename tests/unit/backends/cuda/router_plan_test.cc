// Plans of the router's product: every part of k has its tiles, and shared memory has room.
#include "backends/cuda/moe/router/router_plan.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include "cards.h"

namespace marlin::cuda::router_plan_test {
namespace {

constexpr int kHidden[] = {4, 96, 128, 1024, 1028, 2048, 2880, 4096, 5120, 7168, 16384};
constexpr int kExperts[] = {1, 8, 60, 64, 128, 160, 256, 384, 512};

void ExpectCovers(const RouterPlan& plan, int hidden, int experts) {
  EXPECT_GE(plan.k_tiles * kTileK, hidden);
  EXPECT_LT((plan.k_tiles - 1) * kTileK, hidden);
  EXPECT_GE(plan.tiles_of_part * kRouterParts, plan.k_tiles);
  EXPECT_GE(plan.strips * kStripOutputs, experts);
  EXPECT_GE(plan.sum_stride, experts);
}

void ExpectFits(const RouterPlan& plan, int shared_bytes) {
  EXPECT_LE(plan.slots, plan.tiles_of_part);
  EXPECT_LE(plan.total_bytes, shared_bytes);
  const int weights = plan.slots * plan.strips * kDenseTileBytes;
  EXPECT_GE(plan.total_bytes - weights, plan.barriers + (plan.slots + 1) * kBarrierBytes);
  EXPECT_EQ((plan.total_bytes - weights) % 128, 0);
}

TEST(RouterPlan, PartsCoverEveryTile) {
  for (const Card& card : Cards()) {
    for (const int hidden : kHidden) {
      for (const int experts : kExperts) {
        SCOPED_TRACE(fmt::format("{}: {} x {}", card.name, hidden, experts));
        const auto plan = PlanRouter({hidden, experts}, card.shape);
        ASSERT_TRUE(plan.has_value());
        ExpectCovers(*plan, hidden, experts);
        if (plan->slots > 0) {
          EXPECT_TRUE(card.shape.has_tma());
          ExpectFits(*plan, card.shape.shared_bytes);
        }
      }
    }
  }
}

TEST(RouterPlan, ClustersRouteWhatFits) {
  for (const int hidden : kHidden) {
    for (const int experts : kExperts) {
      if (hidden * experts > 16000 * 256) continue;
      EXPECT_GT(PlanRouter({hidden, experts}, {})->slots, 0) << hidden << " x " << experts;
    }
  }
}

TEST(RouterPlan, KeepsTheWeightsOfAPartWhereTheyFit) {
  EXPECT_EQ(PlanRouter({2048, 128}, {})->slots, 2);
  EXPECT_EQ(PlanRouter({4096, 128}, {})->slots, 4);
  const auto wide = PlanRouter({7168, 256}, {});
  EXPECT_EQ(wide->tiles_of_part, 7);
  EXPECT_EQ(wide->slots, 2);
}

TEST(RouterPlan, RefusesOtherShapes) {
  EXPECT_FALSE(PlanRouter({0, 8}, {}).has_value());
  EXPECT_FALSE(PlanRouter({2050, 8}, {}).has_value());
  EXPECT_FALSE(PlanRouter({2048, 0}, {}).has_value());
  EXPECT_FALSE(PlanRouter({2048, kMostTeamExperts + 1}, {}).has_value());
  EXPECT_EQ(PlanRouter({1 << 30, 8}, {})->slots, 0);
  DeviceShape small;
  small.shared_bytes = 64 * 1024;
  EXPECT_EQ(PlanRouter({2048, 512}, small)->slots, 0);
}

TEST(RouterPlan, TheGemmFitsEveryCard) {
  for (const Card& card : Cards()) {
    for (const int experts : kExperts) {
      for (const int tokens : {1, 65, 150, 2048, 100000}) {
        const RouterPlan plan = *PlanRouter({4096, experts}, card.shape);
        const RouterGemmPlan gemm = PlanRouterGemm(tokens, plan, card.shape);
        EXPECT_LE(RouterGemmBytes(gemm), card.shape.shared_bytes) << card.name;
        EXPECT_GE(gemm.stages, 2);
      }
    }
  }
  const RouterPlan plan = *PlanRouter({4096, 128}, {});
  EXPECT_EQ(PlanRouterGemm(16 * 132, plan, {}).n8_tiles, RouterGemmPlan::kFewN8Tiles);
  EXPECT_EQ(PlanRouterGemm(16 * 132 + 1, plan, {}).n8_tiles, RouterGemmPlan::kMostN8Tiles);
  EXPECT_EQ(PlanRouterGemm(100, plan, {}).stages, RouterGemmPlan::kMostStages);
}

TEST(RouterPlan, ScoresOfTheMostExpertsFit) {
  EXPECT_EQ(MostRouterExperts({}), 14000);
  for (const Card& card : Cards()) {
    const int64_t most = MostRouterExperts(card.shape);
    EXPECT_LE(most * kScoreBytes, card.shape.shared_bytes) << card.name;
    EXPECT_GE(most, kMostTeamExperts);
  }
}

}  // namespace
}  // namespace marlin::cuda::router_plan_test
