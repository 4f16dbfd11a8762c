#include "model/decoder_config.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace marlin::decoder_config_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Config(const std::string& type, const std::string& more) {
  return fmt::format(
      R"({{"model_type": "{}", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 99,
           "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4,
           "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
           "shared_expert_intermediate_size": 48, "q_lora_rank": 32, "kv_lora_rank": 32,
           "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, {}}})",
      type, more);
}

std::vector<int64_t> Windows(const std::string& type, const std::string& more) {
  const Result<DecoderConfig> config = ReadDecoderConfig(Config(type, more));
  EXPECT_TRUE(config.ok()) << config.status().message();
  std::vector<int64_t> windows;
  if (!config.ok()) return windows;
  for (const LayerConfig& layer : config->layers) windows.push_back(layer.window);
  return windows;
}

// The defaults that transformers' configuration classes give an absent layer_types.
TEST(DecoderConfig, EachFamilyHasItsOwnSlidingLayers) {
  const std::string always = R"("sliding_window": 7)";
  const std::string window = always + R"(, "use_sliding_window": true, "max_window_layers": 3)";
  EXPECT_THAT(Windows("mistral", always), ElementsAre(7, 7, 7, 7));
  EXPECT_THAT(Windows("mixtral", always), ElementsAre(7, 7, 7, 7));
  EXPECT_THAT(Windows("qwen2", window), ElementsAre(0, 0, 0, 7));
  EXPECT_THAT(Windows("qwen3", window), ElementsAre(0, 0, 0, 7));
  EXPECT_THAT(Windows("qwen2_moe", window), ElementsAre(7, 0, 7, 0));
  EXPECT_THAT(Windows("qwen2_moe", R"("sliding_window": 7, "use_sliding_window": true,
                                      "max_window_layers": 1)"),
              ElementsAre(7, 0, 0, 0));
  EXPECT_THAT(Windows("qwen3_moe", window), ElementsAre(7, 7, 7, 7));
  EXPECT_THAT(Windows("gpt_oss", always), ElementsAre(7, 0, 7, 0));
}

TEST(DecoderConfig, WindowsThatAreNotGivenAreThoseOfTheType) {
  const std::string none = R"("attention_bias": false)";
  EXPECT_THAT(Windows("mistral", none), ElementsAre(4096, 4096, 4096, 4096));
  EXPECT_THAT(Windows("mistral", R"("sliding_window": null)"), ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(Windows("mixtral", none), ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(Windows("gpt_oss", none), ElementsAre(128, 0, 128, 0));
  EXPECT_THAT(Windows("llama", none), ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(Windows("qwen3", R"("use_sliding_window": true, "max_window_layers": 0)"),
              ElementsAre(4096, 4096, 4096, 4096));
  const auto odd =
      ReadDecoderConfig(Config("qwen3", R"("layer_types": ["sliding_attention", "full_attention",
                                         "full_attention", "full_attention"])"));
  EXPECT_THAT(odd.status().message(), HasSubstr("layer_types: sliding_attention, but"));
}

TEST(DecoderConfig, GroupsOfExpertsMustFit) {
  const auto refused = [](const std::string& more) {
    return ReadDecoderConfig(Config("deepseek_v3", more)).status().message();
  };
  EXPECT_THAT(refused(R"("n_routed_experts": 12)"), HasSubstr("n_group: 12 experts"));
  EXPECT_THAT(refused(R"("n_routed_experts": 16, "topk_group": 9)"),
              HasSubstr("topk_group: 9 of 8 groups"));
  EXPECT_THAT(refused(R"("n_routed_experts": 8, "topk_group": 1)"),
              HasSubstr("num_experts_per_tok: 2 experts of the 1 in 1 groups"));
}

TEST(DecoderConfig, LayerTypesDecideWhereTheyAreThere) {
  const std::string types = R"("sliding_window": 7, "use_sliding_window": true,
      "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"])";
  EXPECT_THAT(Windows("qwen2_moe", types), ElementsAre(0, 7, 0, 0));
  EXPECT_THAT(Windows("qwen3", types), ElementsAre(0, 7, 0, 0));
  EXPECT_THAT(Windows("qwen3", R"("sliding_window": 7, "use_sliding_window": false)"),
              ElementsAre(0, 0, 0, 0));
}

TEST(DecoderConfig, LayersOfGlm4MoeLiteSayWhetherTheyHaveExperts) {
  const auto read = [](const std::string& more) {
    return ReadDecoderConfig(Config("glm4_moe_lite", more));
  };
  // The number of dense layers is a leftover of the other way to specify them.
  const auto config = read(R"("first_k_dense_replace": 1,
                              "mlp_layer_types": ["dense", "dense", "sparse", "dense"])");
  ASSERT_TRUE(config.ok()) << config.status().message();
  std::vector<bool> sparse;
  for (int64_t layer = 0; layer < 5; ++layer) {
    sparse.push_back(IsSparse(*config->family, config->shape, layer));
  }
  EXPECT_THAT(sparse, ElementsAre(false, false, true, false, true));
  const auto counted = read(R"("first_k_dense_replace": 1)");
  ASSERT_TRUE(counted.ok());
  EXPECT_FALSE(IsSparse(*counted->family, counted->shape, 0));
  EXPECT_TRUE(IsSparse(*counted->family, counted->shape, 1));
  EXPECT_THAT(read(R"("mlp_layer_types": ["dense"])").status().message(),
              HasSubstr("mlp_layer_types: 1 entries for 4 layers"));
  EXPECT_THAT(
      read(R"("mlp_layer_types": ["dense", "sparse", "other", "sparse"])").status().message(),
      HasSubstr("mlp_layer_types: entry 2 is neither dense nor sparse"));
}

}  // namespace
}  // namespace marlin::decoder_config_test
