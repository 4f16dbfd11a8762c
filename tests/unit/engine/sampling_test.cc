// Sampling tokens: the remaining tokens, and the frequency of each.
#include "marlin/sampling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "../test_device.h"
#include "marlin/device.h"
#include "ops/decoder/sampling.h"

namespace marlin::sampling_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Samples one text's tokens.
class Sampler {
 public:
  Sampler(const SamplingOptions& options, size_t vocab, const std::vector<int32_t>& prompt = {})
      : device_(*Device::Open(TestDevice(), {.threads = 2})) {
    const int64_t bytes = *SamplerStateBytes(device_, static_cast<int64_t>(vocab));
    memory_ = *DeviceBuffer::Allocate(device_, bytes);
    state_ = {memory_.data(), DType::kU8, {1, bytes}};
    const Status reset =
        ResetSampler(device_, options, static_cast<int64_t>(vocab),
                     {prompt.data(), DType::kI32, {static_cast<int64_t>(prompt.size())}},
                     {memory_.data(), DType::kU8, {bytes}});
    EXPECT_TRUE(reset.ok()) << reset.message();
  }
  Result<int32_t> Draw(const std::vector<float>& logits) {
    std::vector<int32_t> token(1, -1);
    const TensorView row(logits.data(), DType::kF32, {1, static_cast<int64_t>(logits.size())});
    Status status = SampleTokens(device_, row, state_, {token.data(), DType::kI32, {1}});
    if (status.ok()) status = device_.Synchronize();
    if (!status.ok()) return status;
    return token[0];
  }

 private:
  Device device_;
  DeviceBuffer memory_;
  MutableTensorView state_;
};

std::vector<int32_t> Draw(const SamplingOptions& options, const std::vector<float>& logits,
                          int count) {
  Sampler sampler(options, logits.size());
  std::vector<int32_t> drawn;
  for (int i = 0; i < count; ++i) {
    const auto token = sampler.Draw(logits);
    EXPECT_TRUE(token.ok()) << token.status().message();
    drawn.push_back(*token);
  }
  return drawn;
}

std::map<int32_t, int> Count(const std::vector<int32_t>& drawn) {
  std::map<int32_t, int> counts;
  for (const int32_t token : drawn) ++counts[token];
  return counts;
}

TEST(Sampler, TemperatureZeroTakesTheLowestOfTheLargest) {
  EXPECT_THAT(Draw({}, {1, 3, 2, 3}, 2), ElementsAre(1, 1));
  EXPECT_THAT(Draw({.top_k = 2, .top_p = 0.1F}, {-kInfinity, -5, -4}, 1), ElementsAre(2));
}

// The frequencies against softmax(logits / temperature), within five standard deviations.
TEST(Sampler, FrequenciesAreTheSoftmax) {
  constexpr int kCount = 40000;
  const std::vector<float> logits = {0.5F, -1.0F, 2.0F, 0.0F, 1.5F, -kInfinity};
  for (const float temperature : {0.5F, 1.0F, 3.0F}) {
    double sum = 0;
    for (const float x : logits) sum += std::exp(static_cast<double>(x / temperature));
    auto counts = Count(Draw({.temperature = temperature, .seed = 11}, logits, kCount));
    EXPECT_EQ(counts[5], 0);
    for (int32_t i = 0; i < 5; ++i) {
      const double p =
          std::exp(static_cast<double>(logits[static_cast<size_t>(i)] / temperature)) / sum;
      EXPECT_NEAR(counts[i], p * kCount, 5 * std::sqrt(p * (1 - p) * kCount)) << i;
    }
  }
}

TEST(Sampler, TopKAndTopPKeepTheMostLikely) {
  // Probabilities 0.1, 0.4, 0.2, 0.3.
  const std::vector<float> logits = {std::log(0.1F), std::log(0.4F), std::log(0.2F),
                                     std::log(0.3F)};
  const auto kept = [&](SamplingOptions options) {
    options.temperature = 1;
    std::vector<int32_t> tokens;
    for (const auto& [token, count] : Count(Draw(options, logits, 2000))) tokens.push_back(token);
    return tokens;
  };
  EXPECT_THAT(kept({.top_k = 1}), ElementsAre(1));
  EXPECT_THAT(kept({.top_k = 3}), ElementsAre(1, 2, 3));
  EXPECT_THAT(kept({.top_k = 100}), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(kept({.top_p = 1e-6F}), ElementsAre(1));
  EXPECT_THAT(kept({.top_p = 0.39F}), ElementsAre(1));
  EXPECT_THAT(kept({.top_p = 0.41F}), ElementsAre(1, 3));
  EXPECT_THAT(kept({.top_p = 0.95F}), ElementsAre(0, 1, 2, 3));
  // Of the three most likely tokens, 4/9 and 3/9 exceed 0.7.
  EXPECT_THAT(kept({.top_k = 3, .top_p = 0.7F}), ElementsAre(1, 3));
}

// Nuclei larger than the initially sorted part, with equal logits: the lowest ids are kept.
TEST(Sampler, EqualsAreKeptByTheirNumbers) {
  const std::vector<float> logits(1000, 0.25F);
  const auto largest = [&](const SamplingOptions& options) {
    return Count(Draw(options, logits, 20000)).rbegin()->first;
  };
  EXPECT_EQ(largest({.temperature = 1, .top_k = 10}), 9);
  EXPECT_EQ(largest({.temperature = 1, .top_p = 0.25F}), 249);
  EXPECT_EQ(largest({.temperature = 1, .top_p = 0.75F}), 749);
  EXPECT_EQ(largest({.temperature = 1}), 999);
}

// The first numbers of a 64-bit Mersenne twister, times eight: the same on every machine.
TEST(Sampler, TheSeedDecides) {
  const std::vector<float> logits = {0, 0, 0, 0, 0, 0, 0, 0};
  const SamplingOptions options{.temperature = 1, .seed = 1};
  EXPECT_THAT(Draw(options, logits, 8), ElementsAre(1, 1, 3, 0, 2, 7, 3, 0));
  EXPECT_NE(Draw(options, logits, 8), Draw({.temperature = 1, .seed = 2}, logits, 8));
}

TEST(Sampler, MinPDropsTheUnlikely) {
  const std::vector<float> logits = {std::log(0.1F), std::log(0.4F), std::log(0.21F),
                                     std::log(0.3F)};
  const auto kept = [&](SamplingOptions options) {
    options.temperature = 1;
    std::vector<int32_t> tokens;
    for (const auto& [token, count] : Count(Draw(options, logits, 2000))) tokens.push_back(token);
    return tokens;
  };
  EXPECT_THAT(kept({.min_p = 0.2F}), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(kept({.min_p = 0.5F}), ElementsAre(1, 2, 3));
  EXPECT_THAT(kept({.min_p = 1.0F}), ElementsAre(1));
  EXPECT_THAT(kept({.top_p = 0.6F, .min_p = 0.5F}), ElementsAre(1, 3));
}

TEST(Sampler, PenaltiesMoveTheChoiceAwayFromWhatWasSeen) {
  const std::vector<float> logits = {2.0F, 3.0F, 2.5F, -1.0F};
  // 3 / 1.5 = 2 is below 2.5, and -1 * 1.5 is below -1.
  Sampler repeated({.repetition_penalty = 1.5F}, 4, {1, 3});
  EXPECT_EQ(*repeated.Draw(logits), 2);
  EXPECT_EQ(*repeated.Draw(logits), 0);  // 2.5 / 1.5 is below 2, the logit of an unseen token.
  // The presence penalty ignores the prompt and applies once per sampled token ...
  Sampler present({.presence_penalty = 0.75F}, 4, {1});
  EXPECT_EQ(*present.Draw(logits), 1);
  EXPECT_EQ(*present.Draw(logits), 2);
  EXPECT_EQ(*present.Draw(logits), 1);
  // ... the frequency penalty applies per occurrence: 3, 2.6, 2.2 and 2.5, 2.1.
  Sampler frequent({.frequency_penalty = 0.4F}, 4);
  EXPECT_EQ(*frequent.Draw(logits), 1);
  EXPECT_EQ(*frequent.Draw(logits), 1);
  EXPECT_EQ(*frequent.Draw(logits), 2);
  EXPECT_EQ(*frequent.Draw(logits), 1);
  EXPECT_EQ(*frequent.Draw(logits), 2);
}

// Each row uses its own state, on any number of threads.
TEST(Sampler, RowsAreTextsOfTheirOwn) {
  constexpr int64_t kRows = 20;  // More rows than share one kind of launch.
  constexpr int64_t kVocab = 1500;
  std::vector<float> logits(kRows * kVocab);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * i % 13) / 4;
  const Device device = *Device::Open(TestDevice(), {.threads = 3});
  const int64_t bytes = *SamplerStateBytes(device, kVocab);
  const DeviceBuffer memory = *DeviceBuffer::Allocate(device, kRows * bytes);
  const MutableTensorView states(memory.data(), DType::kU8, {kRows, bytes});
  std::vector<Sampler> alone;
  for (int64_t row = 0; row < kRows; ++row) {
    const SamplingOptions options{
        .temperature = 1, .top_k = row * 5, .seed = static_cast<uint64_t>(row)};
    alone.emplace_back(options, kVocab);
    ASSERT_TRUE(ResetSampler(device, options, kVocab, {nullptr, DType::kI32, {0}},
                             {states.As<uint8_t>() + row * bytes, DType::kU8, {bytes}})
                    .ok());
  }
  std::vector<int32_t> tokens(kRows);
  const MutableTensorView out(tokens.data(), DType::kI32, {kRows});
  const auto sample = [&](int64_t vocab) {
    const TensorView rows(logits.data(), DType::kF32, {kRows, vocab});
    Status status = SampleTokens(device, rows, states, out);
    return status.ok() ? device.Synchronize() : status;
  };
  for (int step = 0; step < 20; ++step) {
    ASSERT_TRUE(sample(kVocab).ok());
    for (size_t row = 0; row < kRows; ++row) {
      const auto first = logits.begin() + static_cast<std::ptrdiff_t>(row) * kVocab;
      EXPECT_EQ(tokens[row], *alone[row].Draw({first, first + kVocab}));
    }
  }
  logits[3 * kVocab + 9] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(sample(kVocab).message(), "row 3: logits: nan for token 9");
  EXPECT_THAT(sample(kVocab - 1).message(), HasSubstr("was not reset for 1499 tokens"));
  logits[3 * kVocab + 9] = 0;
  const std::vector<uint8_t> zeros(static_cast<size_t>(bytes));
  ASSERT_TRUE(memory.CopyFrom(zeros.data(), bytes).ok());
  EXPECT_EQ(sample(kVocab).message(), "states: row 0 was not reset for 1500 tokens");
}

TEST(Sampler, ExtremeTemperatures) {
  const std::vector<float> logits = {1, 3e38F, -3e38F, 2};
  EXPECT_THAT(Count(Draw({.temperature = 1e-40F}, logits, 50)),
              ElementsAre(::testing::Pair(1, 50)));
  EXPECT_EQ(Count(Draw({.temperature = 3e38F}, {1, 2, 3}, 1000)).size(), 3U);
}

TEST(Sampler, NonFiniteLogits) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float temperature : {0.0F, 1.0F}) {
    const auto message = [&](const std::vector<float>& logits) {
      Sampler sampler({.temperature = temperature}, logits.size());
      const auto token = sampler.Draw(logits);
      EXPECT_EQ(token.status().code(), Code::kNonFiniteInput);
      return token.status().message();
    };
    EXPECT_EQ(message({1, nan}), "logits: nan for token 1");
    EXPECT_EQ(message({nan, 1}), "logits: nan for token 0");
    EXPECT_EQ(message({1, 2, kInfinity}), "logits: inf for token 2");
    EXPECT_THAT(message({-kInfinity, -kInfinity}), HasSubstr("every token"));
  }
}

TEST(CheckSampling, NamesTheOption) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto message = [](const SamplingOptions& options) {
    return CheckSampling(options).message();
  };
  EXPECT_EQ(message({.temperature = -1}), "temperature: expected 0 or more, got -1");
  EXPECT_THAT(message({.temperature = nan}), HasSubstr("temperature"));
  EXPECT_THAT(message({.temperature = kInfinity}), HasSubstr("temperature"));
  EXPECT_EQ(message({.top_k = -3}), "top_k: expected 0 or more, got -3");
  for (const float p : {0.0F, -1.0F, 1.5F, nan}) {
    EXPECT_THAT(message({.top_p = p}), HasSubstr("top_p: expected more than 0 and at most 1"));
  }
  EXPECT_EQ(message({.min_p = 1.5F}), "min_p: expected 0 to 1, got 1.5");
  EXPECT_EQ(message({.min_p = -0.5F}), "min_p: expected 0 to 1, got -0.5");
  EXPECT_EQ(message({.repetition_penalty = 0}),
            "repetition_penalty: expected 0.001 to 1000, got 0");
  EXPECT_EQ(message({.repetition_penalty = 1001}),
            "repetition_penalty: expected 0.001 to 1000, got 1001");
  EXPECT_THAT(message({.repetition_penalty = nan}), HasSubstr("repetition_penalty"));
  EXPECT_EQ(message({.presence_penalty = 2e6F}),
            "presence_penalty: expected -1000000 to 1000000, got 2000000");
  EXPECT_THAT(message({.presence_penalty = nan}), HasSubstr("presence_penalty"));
  EXPECT_EQ(message({.frequency_penalty = -kInfinity}),
            "frequency_penalty: expected -1000000 to 1000000, got -inf");
  for (const float factor : {0.001F, 1000.0F}) {
    EXPECT_TRUE(CheckSampling({.repetition_penalty = factor}).ok()) << factor;
  }
  EXPECT_TRUE(CheckSampling({.presence_penalty = -1e6F, .frequency_penalty = 1e6F}).ok());
  EXPECT_TRUE(CheckSampling({.temperature = 2, .top_k = 5, .top_p = 0.5F}).ok());
}

}  // namespace
}  // namespace marlin::sampling_test
