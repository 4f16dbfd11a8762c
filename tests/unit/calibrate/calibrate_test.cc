// Statistics and quantized bits that do not depend on the number of threads, and wrong calls.
#include "marlin/calibrate.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "../checkpoint/test_files.h"
#include "../engine/random_model.h"
#include "calibrate/gram_sums.h"
#include "marlin/device.h"

namespace marlin::calibrate_test {
namespace {

Device WithThreads(int threads) { return *Device::Open("cpu", {.threads = threads}); }

std::vector<float> Rows(int64_t rows, int64_t k, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(rows * k));
  for (float& value : values) value = normal(random);
  return values;
}

TEST(GramSums, IsTheMeanOfProducts) {
  constexpr int64_t kRows = 700;
  constexpr int64_t kK = 19;
  const std::vector<float> x = Rows(kRows, kK, 1);
  const std::vector<float> y = Rows(kRows, kK, 2);
  ThreadPool pool(2);
  GramProducts products(WithThreads(2), pool);
  GramSums sums(products, kK);
  ASSERT_TRUE(sums.Add(y.data(), x.data(), kRows).ok());
  EXPECT_EQ(sums.rows(), kRows);
  const std::vector<double> mean = sums.Mean();
  const std::vector<double> other(mean.size(), 3.0);
  const std::vector<double> mixed = sums.MeanWith(other, 100.0);
  for (size_t i = 0; i < kK; ++i) {
    for (size_t j = 0; j < kK; ++j) {
      double expected = 0;
      for (size_t r = 0; r < kRows; ++r) {
        expected += static_cast<double>(y[r * kK + i]) * static_cast<double>(x[r * kK + j]);
      }
      EXPECT_NEAR(mean[i * kK + j], expected / kRows, 1e-5);
      EXPECT_NEAR(mixed[i * kK + j], (expected + 300.0) / (kRows + 100), 1e-5);
    }
  }
}

TEST(GramSums, WithoutRowsIsTheOther) {
  ThreadPool pool(1);
  GramProducts products(WithThreads(1), pool);
  GramSums sums(products, 2);
  ASSERT_TRUE(sums.Add(nullptr, nullptr, 0).ok());
  EXPECT_EQ(sums.Mean(), std::vector<double>(4));
  EXPECT_EQ(sums.MeanWith({1, 2, 3, 4}, 2.0), (std::vector<double>{1, 2, 3, 4}));
}

TEST(GramSums, TheSameBitsWithAnyNumberOfThreads) {
  constexpr int64_t kRows = 1100;
  constexpr int64_t kK = 144;
  const std::vector<float> x = Rows(kRows, kK, 3);
  const auto mean = [&](int threads) {
    ThreadPool pool(threads);
    GramProducts products(WithThreads(threads), pool);
    GramSums sums(products, kK);
    EXPECT_TRUE(sums.Add(x.data(), x.data(), kRows).ok());
    return sums.Mean();
  };
  const std::vector<double> one = mean(1);
  EXPECT_EQ(mean(2), one);
  EXPECT_EQ(mean(16), one);
}

class Calibrated : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(directory_ / "model");
    testing::WriteQwen2(directory_ / "model", 8);
    options_.recipe = *MixedPrecisionConfig::Uniform("u4/g32");
    options_.method = QuantizeMethod::kGptq;
    options_.overwrite = true;
    std::mt19937 random(5);
    for (int i = 0; i < 1400; ++i)
      calibration_.text.push_back(static_cast<int32_t>(random() % 128));
  }
  Result<QuantizeCheckpointReport> Run(int threads) {
    return QuantizeCalibrated(directory_ / "model", directory_ / "out", WithThreads(threads),
                              options_, calibration_);
  }
  std::string Bytes() {
    std::ifstream file(directory_ / "out/model.safetensors", std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  testing::TemporaryDirectory directory_;
  QuantizeCheckpointOptions options_;
  CalibrationOptions calibration_;
};

TEST_F(Calibrated, TheSameBytesWithAnyNumberOfThreads) {
  for (const auto method :
       {QuantizeMethod::kGptq, QuantizeMethod::kAwq, QuantizeMethod::kAwqGptq}) {
    SCOPED_TRACE(std::string(QuantizeMethodName(method)));
    options_.method = method;
    const auto report = Run(1);
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_TRUE(report->fallbacks.empty());
    const std::string one = Bytes();
    EXPECT_FALSE(one.empty());
    for (const int threads : {2, 16}) {
      ASSERT_TRUE(Run(threads).ok());
      EXPECT_EQ(Bytes(), one);
    }
  }
}

TEST_F(Calibrated, ADryRunMeasuresNothing) {
  options_.dry_run = true;
  options_.method = QuantizeMethod::kAwqGptq;
  const auto report = Run(1);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->inputs, 0);
  EXPECT_FALSE(std::filesystem::exists(directory_ / "out"));
}

TEST_F(Calibrated, RefusesWrongCalls) {
  const auto refused = [this](const std::string& message) {
    const auto report = Run(1);
    EXPECT_EQ(report.status().code(), Code::kInvalidArgument);
    EXPECT_EQ(report.status().message(), message);
  };
  calibration_.text[3] = 128;
  refused("calibration text: token 3 is 128, expected 0..127");
  calibration_.text[3] = -1;
  refused("calibration text: token 3 is -1, expected 0..127");
  calibration_.text = {1};
  refused("calibration text: expected 2 tokens or more, got 1");
  calibration_.text = {};
  calibration_.tokens = -1;
  refused("calibration tokens: expected 0 or more, got -1");
  calibration_.tokens = 0;
  options_.method = QuantizeMethod::kMse;
  refused("method mse: uses no calibration");
  options_.method = QuantizeMethod::kGptq;
  const auto plain = QuantizeCheckpoint(directory_ / "model", directory_ / "out", options_);
  EXPECT_EQ(plain.status().message(), "method gptq: needs a text; see QuantizeCalibrated");
  options_.method = QuantizeMethod::kAwq;
  const auto scaled = QuantizeCheckpoint(directory_ / "model", directory_ / "out", options_);
  EXPECT_EQ(scaled.status().message(), "method awq: needs a text; see QuantizeCalibrated");
  EXPECT_FALSE(std::filesystem::exists(directory_ / "out"));
}

}  // namespace
}  // namespace marlin::calibrate_test
