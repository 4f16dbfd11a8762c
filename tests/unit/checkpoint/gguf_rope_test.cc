// RoPE scaling of GGUF files, as llama.cpp reads it.
#include "checkpoint/readers/gguf/gguf_rope.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <nlohmann/json.hpp>
#include <numbers>

#include "recipe/rope_parameters.h"

namespace marlin::gguf_rope_test {
namespace {

using ::testing::HasSubstr;

/// Metadata of one architecture; owns the bytes that they point to.
class Metadata {
 public:
  explicit Metadata(const std::string& architecture) : prefix_(architecture + ".rope.") {}

  Metadata& Real(const std::string& key, float value) {
    return Add(key, GgufType::kF32, std::string(reinterpret_cast<const char*>(&value), 4));
  }
  Metadata& Count(const std::string& key, uint32_t value) {
    return Add(key, GgufType::kU32, std::string(reinterpret_cast<const char*>(&value), 4));
  }
  Metadata& Text(const std::string& key, const std::string& value) {
    const uint64_t length = value.size();
    return Add(key, GgufType::kString,
               std::string(reinterpret_cast<const char*>(&length), 8) + value);
  }
  Json Scaling(std::span<const float> factors = {}) const {
    const GgufArchitecture* architecture =
        FindGgufArchitecture(prefix_.substr(0, prefix_.find('.')));
    return GgufRope(*architecture, metadata_, {factors, {}, {}}).Scaling();
  }

 private:
  Metadata& Add(const std::string& key, GgufType type, std::string bytes) {
    texts_.push_back(prefix_ + key);
    const std::string& name = texts_.back();
    texts_.push_back(std::move(bytes));
    EXPECT_TRUE(metadata_.Add(name, {type, false, 1, texts_.back()}).ok());
    return *this;
  }

  std::string prefix_;
  std::deque<std::string> texts_;
  GgufMetadata metadata_;
};

void ExpectNotUnderstood(const Json& scaling, const char* part) {
  ASSERT_TRUE(scaling.contains("rope_type"));
  EXPECT_THAT(scaling["rope_type"].get<std::string>(), HasSubstr(part));
}

TEST(GgufRope, AFactorWithoutATypeIsLinear) {
  const Json linear = {{"rope_type", "linear"}, {"factor", 4.0}};
  EXPECT_EQ(Metadata("llama").Real("scaling.factor", 4).Scaling(), linear);
  EXPECT_EQ(Metadata("llama").Real("scale_linear", 4).Scaling(), linear);
  EXPECT_EQ(Metadata("llama").Text("scaling.type", "linear").Real("scaling.factor", 4).Scaling(),
            linear);
  EXPECT_TRUE(Metadata("llama").Real("scaling.factor", 0).Scaling().empty());
  EXPECT_TRUE(
      Metadata("llama").Text("scaling.type", "none").Real("scaling.factor", 4).Scaling().empty());
  EXPECT_TRUE(Metadata("llama").Scaling().empty());
}

TEST(GgufRope, TheAttentionFactorMultipliesThatOfYarn) {
  Metadata yarn("qwen3");
  yarn.Text("scaling.type", "yarn").Real("scaling.factor", 4);
  yarn.Count("scaling.original_context_length", 64).Real("scaling.yarn_beta_fast", 16);
  const Json plain = yarn.Scaling();
  EXPECT_EQ(plain, (Json{{"rope_type", "yarn"},
                         {"factor", 4.0},
                         {"beta_fast", 16.0},
                         {"original_max_position_embeddings", 64}}));
  yarn.Real("scaling.attn_factor", 0.5F);
  EXPECT_NEAR(yarn.Scaling()["attention_factor"].get<double>(), 0.5 * YarnScale(4, 1), 1e-6);
}

TEST(GgufRope, WhatIsNotUnderstoodIsNamed) {
  const auto yarn = [] {
    Metadata made("llama");
    made.Text("scaling.type", "yarn").Real("scaling.factor", 4);
    return made;
  };
  Metadata extrapolating = yarn();
  ExpectNotUnderstood(extrapolating.Real("scaling.yarn_ext_factor", 0.5F).Scaling(),
                      "llama.rope.scaling.yarn_ext_factor of 0.5");
  Metadata stored = yarn();
  ExpectNotUnderstood(stored.Real("scaling.yarn_attn_factor", 2).Scaling(), "yarn_attn_factor");
  Metadata computed = yarn();
  computed.Real("scaling.yarn_attn_factor", static_cast<float>(YarnScale(4, 1)));
  EXPECT_EQ(computed.Scaling()["rope_type"], "yarn");
  Metadata logarithm = yarn();
  ExpectNotUnderstood(logarithm.Real("scaling.yarn_log_multiplier", 0.1F).Scaling(),
                      "yarn_log_multiplier");
  ExpectNotUnderstood(Metadata("llama").Real("scaling.attn_factor", 2).Scaling(), "attn_factor");
  ExpectNotUnderstood(Metadata("llama").Text("scaling.type", "longrope").Scaling(), "longrope");
  ExpectNotUnderstood(Metadata("llama").Text("scaling.type", "other").Scaling(), "other");
}

std::vector<float> Llama3Factors(double factor, double low, double high, double context) {
  std::vector<float> factors;
  for (int i = 0; i < 32; ++i) {
    const double turns = context * std::pow(10000.0, -i / 32.0) / (2 * std::numbers::pi);
    const double smooth = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    factors.push_back(static_cast<float>(1 / ((1 - smooth) / factor + smooth)));
  }
  return factors;
}

TEST(GgufRope, NumbersOfLlama3AreFoundInTheFactors) {
  const Json usual = Metadata("llama").Scaling(Llama3Factors(32, 1, 4, 8192));
  EXPECT_EQ(usual, (Json{{"rope_type", "llama3"},
                         {"factor", 32.0},
                         {"low_freq_factor", 1.0},
                         {"high_freq_factor", 4.0},
                         {"original_max_position_embeddings", 8192}}));
  const Json other = Metadata("llama").Scaling(Llama3Factors(8, 1, 3, 512));
  EXPECT_EQ(other["high_freq_factor"], 3.0);
  EXPECT_EQ(other["original_max_position_embeddings"], 512);
  std::vector<float> odd = Llama3Factors(8, 1, 4, 8192);
  odd[20] *= 1.5F;
  ExpectNotUnderstood(Metadata("llama").Scaling(odd), "rope_freqs.weight");
  ExpectNotUnderstood(
      Metadata("llama").Real("scaling.factor", 2).Scaling(Llama3Factors(8, 1, 4, 8192)),
      "rope_freqs.weight beside linear scaling");
  EXPECT_TRUE(Metadata("llama").Scaling(std::vector<float>(32, 1.0F)).empty());
}

}  // namespace
}  // namespace marlin::gguf_rope_test
