#include "model/sampling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace marlin {
namespace {

using testing::HasSubstr;

/// How often each token is drawn.
std::vector<int> Counts(const std::vector<float>& logits, const SamplingOptions& options, int n) {
  Sampler sampler(options);
  std::vector<int> counts(logits.size(), 0);
  for (int i = 0; i < n; ++i) ++counts[static_cast<size_t>(*sampler.Draw(logits))];
  return counts;
}

TEST(Sampler, TemperatureZeroTakesTheFirstOfTheLargest) {
  EXPECT_EQ(*Sampler({}).Draw(std::vector<float>{1, 5, 5, 2}), 1);
}

TEST(Sampler, FrequenciesAreTheSoftmaxAtTheTemperature) {
  const std::vector<float> logits = {0.0F, 1.0F, 2.0F};
  constexpr int kDraws = 60000;
  const std::vector<int> counts = Counts(logits, {.temperature = 2.0F, .seed = 3}, kDraws);
  const double sum = 1 + std::exp(0.5) + std::exp(1.0);
  for (size_t i = 0; i < 3; ++i) {
    const double expected = std::exp(0.5 * static_cast<double>(i)) / sum;
    EXPECT_NEAR(static_cast<double>(counts[i]) / kDraws, expected, 0.01);
  }
}

TEST(Sampler, TopKAndTopPKeepTheMostLikely) {
  const std::vector<float> logits = {1.0F, 4.0F, 2.0F, 3.0F};
  const std::vector<int> by_k = Counts(logits, {.temperature = 5.0F, .top_k = 2}, 2000);
  EXPECT_EQ(by_k[0] + by_k[2], 0);
  EXPECT_GT(by_k[3], 500);
  // e^4 is 64 % of the sum, e^4 + e^3 88 %: the second is needed to reach 70 %.
  const std::vector<int> by_p = Counts(logits, {.temperature = 1.0F, .top_p = 0.7F}, 2000);
  EXPECT_EQ(by_p[0] + by_p[2], 0);
  EXPECT_GT(by_p[3], 300);
  EXPECT_EQ(Counts(logits, {.temperature = 1.0F, .top_p = 0.01F}, 100)[1], 100);
}

TEST(Sampler, NeverDrawsMinusInfinity) {
  const float never = -std::numeric_limits<float>::infinity();
  const std::vector<int> counts =
      Counts({never, 0.0F, never, 0.5F}, {.temperature = 3.0F, .seed = 9}, 3000);
  EXPECT_EQ(counts[0] + counts[2], 0);
}

TEST(Sampler, Errors) {
  EXPECT_THAT(CheckSampling({.temperature = -1}).message(), HasSubstr("temperature"));
  EXPECT_THAT(CheckSampling({.temperature = std::nanf("")}).message(), HasSubstr("temperature"));
  EXPECT_THAT(CheckSampling({.top_k = -1}).message(), HasSubstr("top_k"));
  EXPECT_THAT(CheckSampling({.top_p = 0}).message(), HasSubstr("top_p"));
  EXPECT_THAT(CheckSampling({.top_p = 1.1F}).message(), HasSubstr("top_p"));
  EXPECT_EQ(Sampler({}).Draw(std::vector<float>{0, std::nanf("")}).status().code(),
            Code::kNonFiniteInput);
}

}  // namespace
}  // namespace marlin
