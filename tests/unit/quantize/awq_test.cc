#include "quantize/awq.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/thread_pool.h"
#include "marlin/quantize.h"

namespace marlin::awq_test {
namespace {

constexpr int64_t kK = 64;
constexpr int64_t kN = 24;
constexpr int64_t kTokens = 100;

/// Inputs of which some are `outlier` times as large as the others, and a matrix.
struct Problem {
  Problem(const std::vector<int64_t>& outliers, float outlier, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    inputs.k = kK;
    inputs.mean_squares.resize(kK);
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t k = 0; k < kK; ++k) {
        const bool large = std::find(outliers.begin(), outliers.end(), k) != outliers.end();
        const float value = normal(random) * (large ? outlier : 1.0F);
        inputs.sample.push_back(value);
        inputs.mean_squares[static_cast<size_t>(k)] += value * value / kTokens;
      }
    }
    for (int64_t i = 0; i < kK * kN; ++i) weights.push_back(normal(random));
  }
  AwqMatrix Matrix(Format format = Format::kFp4E2M1) const {
    AwqMatrix matrix{{weights.data(), DType::kF32, {kK, kN}}, {}};
    matrix.options.format = format;
    matrix.options.group_size = 32;
    return matrix;
  }
  std::vector<int8_t> Search(int threads = 2, const AwqSharing& sharing = {},
                             Format format = Format::kFp4E2M1) const {
    ThreadPool pool(threads);
    const AwqMatrix matrix = Matrix(format);
    const auto found = SearchAwqExponents(pool, inputs, sharing, {&matrix, 1}, 256);
    EXPECT_TRUE(found.ok()) << found.status().message();
    return found.ok() ? *found : std::vector<int8_t>();
  }
  /// The squared error of the outputs with these exponents, in double precision.
  double Error(const std::vector<int8_t>& exponents) const {
    std::vector<float> scaled = weights;
    const auto scale = [&](int64_t k) {
      return exponents.empty() ? 1.0 : std::exp2(exponents[static_cast<size_t>(k)]);
    };
    for (int64_t i = 0; i < kK * kN; ++i) {
      scaled[static_cast<size_t>(i)] *= static_cast<float>(scale(i / kN));
    }
    const auto quantized = Quantize({scaled.data(), DType::kF32, {kK, kN}}, Matrix().options);
    EXPECT_TRUE(quantized.ok());
    std::vector<float> decoded(scaled.size());
    EXPECT_TRUE(Dequantize(*quantized, {decoded.data(), DType::kF32, {kK, kN}}).ok());
    double sum = 0;
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t n = 0; n < kN; ++n) {
        double error = 0;
        for (int64_t k = 0; k < kK; ++k) {
          const auto i = static_cast<size_t>(k * kN + n);
          error +=
              inputs.sample[static_cast<size_t>(t * kK + k)] * (decoded[i] / scale(k) - weights[i]);
        }
        sum += error * error;
      }
    }
    return sum;
  }

  AwqInputs inputs;
  std::vector<float> weights;
};

TEST(Awq, LargeInputsGetLargeScales) {
  const std::vector<int64_t> outliers = {3, 20, 21, 60};
  const Problem problem(outliers, 30.0F, 1);
  const std::vector<int8_t> exponents = problem.Search();
  ASSERT_EQ(exponents.size(), kK);
  for (int64_t k = 0; k < kK; ++k) {
    const bool large = std::find(outliers.begin(), outliers.end(), k) != outliers.end();
    EXPECT_EQ(exponents[static_cast<size_t>(k)] > 0, large) << k;
  }
  EXPECT_LT(problem.Error(exponents), 0.5 * problem.Error({}));
}

TEST(Awq, InputsOfOneSizeGetNone) {
  const Problem problem({}, 1.0F, 2);
  EXPECT_TRUE(problem.Search().empty());
}

TEST(Awq, TheSameExponentsWithAnyNumberOfThreads) {
  const Problem problem({0, 5, 40}, 12.0F, 3);
  const std::vector<int8_t> one = problem.Search(1);
  EXPECT_FALSE(one.empty());
  EXPECT_EQ(problem.Search(2), one);
  EXPECT_EQ(problem.Search(16), one);
}

TEST(Awq, InputsCanShareAScale) {
  // Input i and i + 32 have one; only the second of the pair 7 and 39 is large.
  AwqSharing sharing;
  sharing.scales = 32;
  for (int32_t k = 0; k < kK; ++k) sharing.scale_of.push_back(k % 32);
  const Problem problem({39}, 40.0F, 4);
  const std::vector<int8_t> exponents = problem.Search(2, sharing);
  ASSERT_EQ(exponents.size(), 32U);
  EXPECT_EQ(*std::max_element(exponents.begin(), exponents.end()), exponents[7]);
  EXPECT_GT(exponents[7], exponents[8]);
}

TEST(Awq, DeadInputsAndMatricesAreNoError) {
  Problem problem({3}, 30.0F, 5);
  for (int64_t t = 0; t < kTokens; ++t) problem.inputs.sample[static_cast<size_t>(t * kK + 9)] = 0;
  problem.inputs.mean_squares[9] = 0;
  for (int64_t n = 0; n < kN; ++n) problem.weights[static_cast<size_t>(11 * kN + n)] = 0;
  EXPECT_FALSE(problem.Search().empty());
  std::fill(problem.weights.begin(), problem.weights.end(), 0.0F);
  EXPECT_TRUE(problem.Search().empty());
  problem = Problem({3}, 30.0F, 5);
  std::fill(problem.inputs.sample.begin(), problem.inputs.sample.end(), 0.0F);
  std::fill(problem.inputs.mean_squares.begin(), problem.inputs.mean_squares.end(), 0.0F);
  EXPECT_TRUE(problem.Search().empty());
}

TEST(Awq, InputsThatOverflowGetNone) {
  const float infinity = std::numeric_limits<float>::infinity();
  Problem problem({3}, 30.0F, 8);
  problem.inputs.mean_squares[5] = infinity;
  EXPECT_TRUE(problem.Search().empty());
  problem = Problem({3}, 30.0F, 8);
  problem.inputs.sample[70] = infinity;
  EXPECT_TRUE(problem.Search().empty());
  problem.inputs.sample[70] = std::nanf("");
  EXPECT_TRUE(problem.Search().empty());
}

TEST(Awq, EveryFormat) {
  const Problem problem({3, 33}, 100.0F, 6);
  for (const FormatInfo& info : AllFormats()) {
    if (!info.quantized) continue;
    SCOPED_TRACE(std::string(info.name));
    // Eight bits of mantissa leave an error too small to be worth a scale; no format fails.
    const std::vector<int8_t> exponents = problem.Search(2, {}, info.format);
    EXPECT_TRUE(info.bits > 4 || !exponents.empty());
  }
}

TEST(Awq, ManyMatricesAreSampled) {
  const Problem problem({3, 33}, 30.0F, 7);
  // Only every second one has weights.
  const std::vector<float> zeros(problem.weights.size());
  std::vector<AwqMatrix> matrices(100, problem.Matrix());
  for (size_t i = 0; i < matrices.size(); i += 2) {
    matrices[i].matrix = {zeros.data(), DType::kF32, {kK, kN}};
  }
  ThreadPool pool(2);
  const auto few = SearchAwqExponents(pool, problem.inputs, {}, matrices, 16);
  ASSERT_TRUE(few.ok());
  ASSERT_EQ(few->size(), kK);
  EXPECT_GT((*few)[3], (*few)[4]);
}

}  // namespace
}  // namespace marlin::awq_test
