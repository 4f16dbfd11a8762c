// Log-probabilities of tokens, and the most likely tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "../test_device.h"
#include "marlin/device.h"
#include "marlin/sampling.h"

namespace marlin::log_probabilities_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsNan;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// The results for some rows.
struct Results {
  std::vector<float> of_ids;
  std::vector<int32_t> likely_ids;
  std::vector<float> of_likely;
  Status status;
};

Results Rank(const std::vector<float>& logits, const std::vector<int32_t>& ids, int64_t likely) {
  const Device device = *Device::Open(TestDevice(), {.threads = 2});
  const auto rows = static_cast<int64_t>(ids.size());
  const auto count = static_cast<size_t>(rows * likely);
  Results results{std::vector<float>(ids.size(), 7),
                  std::vector<int32_t>(count, 7),
                  std::vector<float>(count, 7),
                  {}};
  const int64_t vocab = static_cast<int64_t>(logits.size()) / rows;
  results.status = LogProbabilities(device, {logits.data(), DType::kF32, {rows, vocab}},
                                    {ids.data(), DType::kI32, {rows}},
                                    {{results.of_ids.data(), DType::kF32, {rows}},
                                     {results.likely_ids.data(), DType::kI32, {rows, likely}},
                                     {results.of_likely.data(), DType::kF32, {rows, likely}}});
  if (results.status.ok()) results.status = device.Synchronize();
  return results;
}

/// The log softmax of a row, in double.
std::vector<double> LogSoftmax(const float* logits, size_t vocab) {
  const double largest = static_cast<double>(*std::max_element(logits, logits + vocab));
  double sum = 0;
  for (size_t i = 0; i < vocab; ++i) sum += std::exp(static_cast<double>(logits[i]) - largest);
  std::vector<double> all(vocab);
  for (size_t i = 0; i < vocab; ++i) {
    all[i] = static_cast<double>(logits[i]) - largest - std::log(sum);
  }
  return all;
}

std::vector<int32_t> Order(const std::vector<double>& values) {
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  return order;
}

TEST(LogProbabilities, AreTheLogSoftmax) {
  for (const size_t vocab : {1U, 31U, 1000U, 5000U, 40001U}) {
    SCOPED_TRACE(vocab);
    constexpr size_t kRows = 5;
    std::mt19937 random(static_cast<uint32_t>(vocab));
    std::normal_distribution<float> normal(0, 6);
    std::vector<float> logits(kRows * vocab);
    for (float& logit : logits) logit = std::round(normal(random) * 64) / 64;  // With ties.
    std::vector<int32_t> ids;
    for (size_t row = 0; row < kRows; ++row) ids.push_back(static_cast<int32_t>(random() % vocab));
    const auto likely = static_cast<int64_t>(std::min<size_t>(vocab, 20));
    const Results results = Rank(logits, ids, likely);
    ASSERT_TRUE(results.status.ok()) << results.status.message();
    for (size_t row = 0; row < kRows; ++row) {
      const std::vector<double> expected = LogSoftmax(&logits[row * vocab], vocab);
      EXPECT_NEAR(results.of_ids[row], expected[static_cast<size_t>(ids[row])], 2e-5);
      const std::vector<int32_t> order = Order(expected);
      for (size_t i = 0; i < static_cast<size_t>(likely); ++i) {
        const size_t at = row * static_cast<size_t>(likely) + i;
        ASSERT_EQ(results.likely_ids[at], order[i]) << i;
        EXPECT_NEAR(results.of_likely[at], expected[static_cast<size_t>(order[i])], 2e-5);
      }
      // A row has the same bits alone.
      const auto first = logits.begin() + static_cast<std::ptrdiff_t>(row * vocab);
      const auto size = static_cast<std::ptrdiff_t>(vocab);
      EXPECT_EQ(Rank({first, first + size}, {ids[row]}, 1).of_ids[0], results.of_ids[row]);
    }
  }
}

TEST(LogProbabilities, TiesAreInTheOrderOfIds) {
  std::vector<float> logits(3000, 0.5F);
  logits[2999] = 1;
  logits[1024] = logits[2048] = 0.75F;  // One thread of a GPU has both.
  const Results results = Rank(logits, {3}, 6);
  EXPECT_THAT(results.likely_ids, ElementsAre(2999, 1024, 2048, 0, 1, 2));
}

TEST(LogProbabilities, OfNoTokenAndOfExcludedOnes) {
  const std::vector<float> logits = {0, -kInfinity, 0, 0.0F, -0.0F, -kInfinity};
  Results results = Rank(logits, {1, -1}, 3);
  EXPECT_EQ(results.of_ids[0], -kInfinity);
  EXPECT_THAT(results.of_ids[1], IsNan());
  EXPECT_THAT(results.likely_ids, ElementsAre(0, 2, 1, 0, 1, 2));
  EXPECT_EQ(results.of_likely[2], -kInfinity);
  EXPECT_FLOAT_EQ(results.of_likely[0], std::log(0.5F));
  results = Rank(logits, {0, 0}, 0);
  EXPECT_TRUE(results.status.ok());
  EXPECT_FLOAT_EQ(results.of_ids[1], std::log(0.5F));
}

TEST(LogProbabilities, RowsWithoutProbabilities) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::vector<float>& bad :
       {std::vector<float>{1, nan, 2}, {1, kInfinity, 2}, {-kInfinity, -kInfinity, -kInfinity}}) {
    std::vector<float> logits = bad;
    logits.insert(logits.end(), {1, 2, 3});
    const Results results = Rank(logits, {2, 2}, 2);
    ASSERT_TRUE(results.status.ok());
    EXPECT_THAT(results.of_ids[0], IsNan());
    EXPECT_THAT(results.likely_ids, ElementsAre(-1, -1, 2, 1));
    EXPECT_THAT(results.of_likely[0], IsNan());
    EXPECT_NEAR(results.of_ids[1], -0.407606, 1e-5);
  }
}

TEST(LogProbabilities, RefuseWrongCalls) {
  const std::vector<float> logits = {1, 2, 3, 4, 5, 6};
  EXPECT_EQ(Rank(logits, {0, 3}, 1).status.message(), "ids: expected 0..2, got 3 at 1");
  EXPECT_EQ(Rank(logits, {0, 1}, 4).status.message(), "likely_ids: expected 0..3 columns, got 4");
  EXPECT_EQ(Rank(std::vector<float>(60), {0, 1}, 21).status.message(),
            "likely_ids: expected 0..20 columns, got 21");
  const Device device = *Device::Open(TestDevice());
  std::vector<int32_t> ids = {0, 1};
  std::vector<float> out(4);
  const TensorView rows(logits.data(), DType::kF32, {2, 3});
  const MutableTensorView of_ids(out.data(), DType::kF32, {2});
  const MutableTensorView likely(ids.data(), DType::kI32, {2, 0});
  const MutableTensorView of_likely(out.data() + 2, DType::kF32, {2, 0});
  EXPECT_EQ(
      LogProbabilities(device, rows, {ids.data(), DType::kI32, {1}}, {of_ids, likely, of_likely})
          .message(),
      "ids: expected i32 [2], got i32 [1]");
  EXPECT_EQ(
      LogProbabilities(device, rows, {ids.data(), DType::kI32, {2}}, {of_likely, likely, of_likely})
          .message(),
      "of_ids: expected f32 [2], got f32 [2, 0]");
}

}  // namespace
}  // namespace marlin::log_probabilities_test
