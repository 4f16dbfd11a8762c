#include "marlin/moe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "reference/decoder.h"

namespace marlin {
namespace {

using Scoring = RouterOptions::Scoring;
using testing::HasSubstr;

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Status Route(const std::vector<float>& logits, int64_t experts, const RouterOptions& options,
             Routed* routed) {
  const Device device = *Device::Open("cpu", {.threads = 2});
  const auto tokens = static_cast<int64_t>(logits.size()) / experts;
  routed->ids.assign(static_cast<size_t>(tokens * options.top_k), -1);
  routed->weights.assign(routed->ids.size(), 0.0F);
  const Shape shape{tokens, options.top_k};
  return RouteTokens(device, {logits.data(), DType::kF32, {tokens, experts}}, options,
                     {routed->ids.data(), DType::kI32, shape},
                     {routed->weights.data(), DType::kF32, shape});
}

/// Every token of random logits against the reference.
void ExpectMeaning(int64_t experts, const RouterOptions& options, std::mt19937& random) {
  constexpr int64_t kTokens = 50;
  std::normal_distribution<float> normal(0.0F, 2.0F);
  std::vector<float> logits(static_cast<size_t>(kTokens * experts));
  for (float& x : logits) x = normal(random);
  Routed routed;
  ASSERT_TRUE(Route(logits, experts, options, &routed).ok());
  for (int64_t token = 0; token < kTokens; ++token) {
    const auto first = logits.begin() + token * experts;
    const auto want = reference::RouteToken(std::vector<double>(first, first + experts), options);
    for (int64_t i = 0; i < options.top_k; ++i) {
      const auto at = static_cast<size_t>(token * options.top_k + i);
      ASSERT_EQ(routed.ids[at], want.ids[static_cast<size_t>(i)]);
      ASSERT_NEAR(static_cast<double>(routed.weights[at]), want.weights[static_cast<size_t>(i)],
                  1e-6);
    }
  }
}

TEST(RouteTokens, AgreesWithItsMeaning) {
  constexpr Scoring kScorings[] = {Scoring::kSoftmax, Scoring::kSoftmaxOfChosen, Scoring::kSigmoid};
  constexpr int64_t kExperts[] = {1, 8, 60, 256};
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0F, 2.0F);
  for (unsigned variant = 0; variant < 3 * 4 * 2 * 2; ++variant) {
    const int64_t experts = kExperts[variant / 3 % 4];
    std::vector<float> bias(static_cast<size_t>(experts));
    for (float& b : bias) b = normal(random);
    RouterOptions options;
    options.scoring = kScorings[variant % 3];
    options.top_k = std::min<int64_t>(experts, 6);
    options.normalize = variant / 12 % 2 != 0;
    options.scaling_factor = 2.5F;
    options.groups = experts == 256 ? 8 : 1;
    options.top_groups = experts == 256 ? 3 : 1;
    if (variant / 24 != 0) options.choice_bias = {bias.data(), DType::kF32, {experts}};
    ExpectMeaning(experts, options, random);
  }
}

TEST(RouteTokens, EqualScoresGoToTheLowerExpert) {
  Routed routed;
  ASSERT_TRUE(Route({1, 3, 3, 3, 0, 3}, 6, {.top_k = 3}, &routed).ok());
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{1, 2, 3}));
  const float low = -INFINITY;
  ASSERT_TRUE(Route({low, 1, low, low}, 4, {.top_k = 3}, &routed).ok());
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{1, 0, 2}));
}

TEST(RouteTokens, Errors) {
  Routed routed;
  std::vector<float> logits(24, 0.0F);
  EXPECT_THAT(Route(logits, 8, {.top_k = 9}, &routed).message(),
              HasSubstr("top_k: expected 1..8 (experts), got 9"));
  EXPECT_THAT(Route(logits, 8, {.groups = 3}, &routed).message(),
              HasSubstr("groups: 8 experts cannot be in 3 equal groups"));
  EXPECT_THAT(Route(logits, 8, {.top_k = 5, .groups = 4, .top_groups = 2}, &routed).message(),
              HasSubstr("top_k: 5 experts of 4 in the 2 groups"));
  logits[13] = std::nanf("");
  EXPECT_THAT(Route(logits, 8, {}, &routed).message(), HasSubstr("logits: NaN at [1, 5]"));
}

}  // namespace
}  // namespace marlin
