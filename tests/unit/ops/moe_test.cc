#include "marlin/moe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "reference/decoder.h"

namespace marlin::moe_test {
namespace {

using Scoring = RouterOptions::Scoring;
using ::testing::HasSubstr;

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

/// Checks every token of random logits against the reference.
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
  for (unsigned variant = 0; variant < 3 * 4 * 2 * 2 * 2; ++variant) {
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
    options.best_of_group = variant / 48 + 1;
    options.least_sum = variant / 48 != 0 ? 0.5F : 0.0F;
    if (variant / 24 % 2 != 0) options.choice_bias = {bias.data(), DType::kF32, {experts}};
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
              HasSubstr("top_k: 5 experts of the 4 in 2 selected groups"));
  EXPECT_THAT(Route(logits, 8, {.best_of_group = 3}, &routed).message(),
              HasSubstr("best_of_group: expected 1 or 2, got 3"));
  EXPECT_THAT(Route(logits, 8, {.least_sum = -1.0F}, &routed).message(),
              HasSubstr("least_sum: expected a finite number from 0 on, got -1"));
  logits[13] = std::nanf("");
  EXPECT_THAT(Route(logits, 8, {}, &routed).message(), HasSubstr("logits: NaN at [1, 5]"));
  logits[6] = INFINITY;
  EXPECT_THAT(Route(logits, 8, {}, &routed).message(), HasSubstr("logits: Inf at [0, 6]"));
  std::fill_n(logits.begin(), 8, -INFINITY);
  EXPECT_THAT(Route(logits, 8, {}, &routed).message(),
              HasSubstr("logits: expected a finite one per token, got -Inf for all 8 experts of "
                        "token 0"));
  const std::vector<float> bias = {0, std::nanf(""), 0, 0, 0, 0, 0, 0};
  EXPECT_THAT(Route(logits, 8, {.choice_bias = {bias.data(), DType::kF32, {8}}}, &routed).message(),
              HasSubstr("choice_bias: NaN at 1"));
  EXPECT_THAT(Route(logits, 8, {.choice_bias = {bias.data(), DType::kF32, {7}}}, &routed).message(),
              HasSubstr("choice_bias: expected [8], got [7]"));
}

TEST(RouteTokens, OutputsLieApart) {
  const Device device = *Device::Open("cpu");
  std::vector<float> memory(64, 0.0F);
  const TensorView logits(memory.data(), DType::kF32, {4, 8});
  const Shape shape{4, 2};
  const MutableTensorView ids(memory.data() + 32, DType::kI32, shape);
  EXPECT_THAT(
      RouteTokens(device, logits, {}, ids, {memory.data() + 24, DType::kF32, shape}).message(),
      HasSubstr("weights: overlaps logits"));
  EXPECT_THAT(
      RouteTokens(device, logits, {}, ids, {memory.data() + 36, DType::kF32, shape}).message(),
      HasSubstr("weights: overlaps ids"));
  EXPECT_TRUE(RouteTokens(device, logits, {}, ids, {memory.data() + 40, DType::kF32, shape}).ok());
  EXPECT_THAT(RouteTokens(device, logits, {}, {memory.data() + 32, DType::kI32, shape, {1, 1}},
                          {memory.data() + 40, DType::kF32, shape})
                  .message(),
              HasSubstr("ids: row stride 1 is smaller than the 2 columns"));
}

// By hand: DeepSeek-V3's routing. Groups {0, 1}, {2, 3}, {4, 5}; the best two are selected by the
// sum of biased sigmoids; the bias changes the top-k selection but not the weights.
TEST(RouteTokens, GroupsAndBiasByHand) {
  const auto logit = [](float score) { return std::log(score / (1.0F - score)); };
  const std::vector<float> scores = {0.9F, 0.1F, 0.5F, 0.45F, 0.6F, 0.2F};
  const std::vector<float> bias = {-0.5F, 0.0F, 0.0F, 0.2F, 0.0F, 0.0F};
  std::vector<float> logits;
  for (const float score : scores) logits.push_back(logit(score));
  RouterOptions options{.top_k = 2, .scoring = Scoring::kSigmoid, .scaling_factor = 2.0F};
  options.groups = 3;
  options.top_groups = 2;
  options.choice_bias = {bias.data(), DType::kF32, {6}};
  Routed routed;
  ASSERT_TRUE(Route(logits, 6, options, &routed).ok());
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{3, 4}));  // 0.65, then 0.6; group 0 has only 0.5.
  EXPECT_NEAR(routed.weights[0], 2 * 0.45 / 1.05, 1e-6);
  EXPECT_NEAR(routed.weights[1], 2 * 0.6 / 1.05, 1e-6);
  options.normalize = false;
  ASSERT_TRUE(Route(logits, 6, options, &routed).ok());
  EXPECT_NEAR(routed.weights[0], 0.9, 1e-6);
}

// By hand: DeepSeek-V2's routing. The probabilities are 0.4, 0.02, 0.29, 0.29; the best expert of
// each group is compared, of which group 0 has the better, though the other has the larger sum.
TEST(RouteTokens, TheBestOfAGroupByHand) {
  std::vector<float> logits;
  for (const float p : {0.4F, 0.02F, 0.29F, 0.29F}) logits.push_back(std::log(p));
  RouterOptions options{.top_k = 2, .normalize = false, .scaling_factor = 16.0F};
  options.groups = 2;
  options.best_of_group = 1;
  Routed routed;
  ASSERT_TRUE(Route(logits, 4, options, &routed).ok());
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{0, 1}));
  EXPECT_NEAR(routed.weights[0], 6.4, 1e-5);
  EXPECT_NEAR(routed.weights[1], 0.32, 1e-5);
  options.best_of_group = 2;
  ASSERT_TRUE(Route(logits, 4, options, &routed).ok());
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{2, 3}));
}

// By hand: the probabilities of the selected experts, 0.3 and 0.1, are divided by 0.8 instead of
// their sum.
TEST(RouteTokens, TheSumHasALeastValue) {
  const std::vector<float> logits = {std::log(0.6F), std::log(0.3F), std::log(0.1F)};
  const std::vector<float> bias = {-1.0F, 0.0F, 0.0F};
  RouterOptions options{.top_k = 2, .choice_bias = {bias.data(), DType::kF32, {3}}};
  options.least_sum = 0.8F;
  Routed routed;
  ASSERT_TRUE(Route(logits, 3, options, &routed).ok());
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{1, 2}));
  EXPECT_NEAR(routed.weights[0], 0.375, 1e-6);
  EXPECT_NEAR(routed.weights[1], 0.125, 1e-6);
}

// A bias that selects experts far below the best logit must not underflow their softmax.
TEST(RouteTokens, WeightsHaveFactorsOfTheirExperts) {
  const std::vector<float> logits = {0.0F, 3.0F, 2.0F, -1.0F};
  const std::vector<float> scales = {5.0F, 0.5F, -4.0F, 7.0F};
  Routed plain;
  Routed scaled;
  ASSERT_TRUE(Route(logits, 4, {.top_k = 2}, &plain).ok());
  RouterOptions options{.top_k = 2};
  options.scales = {scales.data(), DType::kF32, {4}};
  ASSERT_TRUE(Route(logits, 4, options, &scaled).ok());
  EXPECT_EQ(scaled.ids, plain.ids);
  EXPECT_FLOAT_EQ(scaled.weights[0], 0.5F * plain.weights[0]);
  EXPECT_FLOAT_EQ(scaled.weights[1], -4.0F * plain.weights[1]);
  options.scales = {scales.data(), DType::kF32, {3}};
  EXPECT_THAT(Route(logits, 4, options, &scaled).message(),
              HasSubstr("scales: expected [4], got [3]"));
}

TEST(RouteTokens, SoftmaxOfChosenIsRelativeToTheChosen) {
  const std::vector<float> bias = {-4000, 0, 0, 0};
  Routed routed;
  ASSERT_TRUE(Route({2000, 1, 1, -3}, 4,
                    {.top_k = 2,
                     .scoring = Scoring::kSoftmaxOfChosen,
                     .choice_bias = {bias.data(), DType::kF32, {4}}},
                    &routed)
                  .ok());
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(routed.weights, (std::vector<float>{0.5F, 0.5F}));
}

}  // namespace
}  // namespace marlin::moe_test
