#include "model/decoder_config.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

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

TEST(DecoderConfig, LayersOfGemmaHaveWindowsAndRotariesOfTheirKind) {
  const std::string window = R"("sliding_window": 7)";
  EXPECT_THAT(Windows("gemma2", window), ElementsAre(7, 0, 7, 0));
  EXPECT_THAT(Windows("gemma3_text", window + R"(, "sliding_window_pattern": 3)"),
              ElementsAre(7, 7, 0, 7));
  EXPECT_THAT(Windows("gemma4_text", window + R"(, "hidden_size_per_layer_input": 0)"),
              ElementsAre(7, 7, 7, 0));
  const auto one = ReadDecoderConfig(Config("gemma2", window));
  ASSERT_TRUE(one.ok()) << one.status().message();
  EXPECT_EQ(one->rotaries.size(), 1U);
  EXPECT_EQ(one->score_softcap, 50);
  EXPECT_EQ(one->logit_softcap, 30);
  EXPECT_EQ(one->layer(0).score_scale, 1.0F / 16);
  const auto two = ReadDecoderConfig(Config("gemma3_text", window));
  ASSERT_TRUE(two.ok()) << two.status().message();
  EXPECT_EQ(two->rotaries.size(), 2U);
  EXPECT_EQ(two->layer(0).rotary, 1U);
  EXPECT_EQ(two->score_softcap, 0);
}

TEST(DecoderConfig, HeadsOfGemma4DifferByLayer) {
  const auto config =
      ReadDecoderConfig(Config("gemma4_text", R"("hidden_size_per_layer_input": 0, "head_dim": 16,
                               "global_head_dim": 32, "attention_k_eq_v": true,
                               "num_global_key_value_heads": 1)"));
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->layer(0).sizes.head_dim, 16);
  EXPECT_EQ(config->layer(0).sizes.kv_heads, 4);
  EXPECT_FALSE(config->layer(0).sizes.keys_are_values);
  EXPECT_EQ(config->layer(3).sizes.head_dim, 32);
  EXPECT_EQ(config->layer(3).sizes.kv_heads, 1);
  EXPECT_TRUE(config->layer(3).sizes.keys_are_values);
  EXPECT_EQ(config->layer(3).score_scale, 1);
  // A quarter of the pairs turns.
  const std::vector<float>& frequencies = config->rotaries[0].inverse_frequencies;
  ASSERT_EQ(frequencies.size(), 16U);
  EXPECT_EQ(std::count(frequencies.begin(), frequencies.end(), 0.0F), 12);
  const auto refused = [](const std::string& more) {
    return ReadDecoderConfig(Config("gemma4_text", more)).status().message();
  };
  EXPECT_THAT(refused(R"("vocab_size_per_layer_input": 7)"),
              HasSubstr("vocab_size_per_layer_input: 7, but vocab_size is "));
  const std::string dense = R"("hidden_size_per_layer_input": 0, )";
  EXPECT_THAT(refused(dense + R"("num_kv_shared_layers": 4)"),
              HasSubstr("num_kv_shared_layers: 4 of 4 layers"));
  EXPECT_THAT(refused(dense + R"("num_kv_shared_layers": 1)"),
              HasSubstr("num_kv_shared_layers: 1: no layer before them is of the kind of layer 3"));
  EXPECT_THAT(refused(dense + R"("enable_moe_block": true)"), HasSubstr("num_experts"));
  EXPECT_THAT(refused(dense + R"("per_layer_config": {"1": {"sliding_window": 3}})"),
              HasSubstr("per_layer_config: 1: sliding_window is not understood"));
  EXPECT_THAT(refused(dense + R"("per_layer_config": {"1": {"head_dim": 32}})"),
              HasSubstr("per_layer_config: 1: head_dim 32, but another layer of its kind has 256"));
  EXPECT_THAT(refused(dense + R"("per_layer_config": {"x": {"head_dim": 32}})"),
              HasSubstr("per_layer_config: x: no such layer"));
}

TEST(DecoderConfig, LastLayersOfGemma4ReadOthersKeysAndValues) {
  const auto config =
      ReadDecoderConfig(Config("gemma4_text", R"("layer_types": ["sliding_attention",
          "full_attention", "sliding_attention", "full_attention"], "num_kv_shared_layers": 2,
          "use_double_wide_mlp": true, "hidden_size_per_layer_input": 16, "sliding_window": 7)"));
  ASSERT_TRUE(config.ok()) << config.status().message();
  std::vector<int64_t> sources;
  std::vector<int64_t> widths;
  for (const LayerConfig& layer : config->layers) {
    sources.push_back(layer.sizes.kv_source);
    widths.push_back(layer.sizes.intermediate / config->shape.intermediate);
  }
  EXPECT_THAT(sources, ElementsAre(-1, -1, 0, 1));
  EXPECT_THAT(widths, ElementsAre(1, 1, 2, 2));
  EXPECT_EQ(config->shape.layer_features, 16);
  EXPECT_FLOAT_EQ(config->layer_embedding_scale, 4 / std::sqrt(2.0F));
}

TEST(DecoderConfig, EmbeddingsOfGemmaAreScaledInTheTypeOfTheModel) {
  const auto scale = [](const std::string& more) {
    std::string text = Config("gemma2", more + R"("sliding_window": 7)");
    const std::string small = R"("hidden_size": 64)";
    text.replace(text.find(small), small.size(), R"("hidden_size": 3072)");
    const auto config = ReadDecoderConfig(text);
    EXPECT_TRUE(config.ok()) << config.status().message();
    return config.ok() ? config->embedding_scale : 0;
  };
  EXPECT_NEAR(scale(""), 55.4256, 1e-4);
  EXPECT_EQ(scale(R"("dtype": "bfloat16", )"), 55.5F);
  EXPECT_EQ(scale(R"("torch_dtype": "bfloat16", )"), 55.5F);
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

std::vector<bool> Rotating(const std::string& type, const std::string& more) {
  const Result<DecoderConfig> config = ReadDecoderConfig(Config(type, more));
  EXPECT_TRUE(config.ok()) << config.status().message();
  std::vector<bool> rotating;
  for (int64_t i = 0; config.ok() && i < 4; ++i) rotating.push_back(config->rotary(i) != nullptr);
  return rotating;
}

TEST(DecoderConfig, EachFamilyHasItsOwnLayersThatRotate) {
  const std::string windows = R"("sliding_window": 7, "sliding_window_pattern": 2)";
  EXPECT_THAT(Rotating("llama", R"("mlp_bias": false)"), ElementsAre(true, true, true, true));
  EXPECT_THAT(Rotating("smollm3", R"("mlp_bias": false)"), ElementsAre(true, true, true, false));
  EXPECT_THAT(Rotating("smollm3", R"("no_rope_layer_interval": 2)"),
              ElementsAre(true, false, true, false));
  EXPECT_THAT(Rotating("smollm3", R"("no_rope_layers": [0, 1, 0, 1, 1])"),
              ElementsAre(false, true, false, true));
  EXPECT_THAT(Windows("smollm3", R"("no_rope_layers": [0, 1, 0, 1], "use_sliding_window": true,
                                    "sliding_window": 7)"),
              ElementsAre(7, 0, 7, 0));
  EXPECT_THAT(Windows("exaone4", windows), ElementsAre(7, 0, 7, 0));
  EXPECT_THAT(Rotating("exaone4", windows), ElementsAre(true, false, true, false));
  EXPECT_THAT(Rotating("cohere2", windows), ElementsAre(true, false, true, false));
  // Without a window all layers of the one rotate, and none of the other.
  EXPECT_THAT(Rotating("exaone4", R"("sliding_window": null)"),
              ElementsAre(true, true, true, true));
  EXPECT_THAT(Rotating("cohere2", R"("sliding_window": null)"),
              ElementsAre(false, false, false, false));
  const auto few = ReadDecoderConfig(Config("smollm3", R"("no_rope_layers": [1, 1])"));
  EXPECT_THAT(few.status().message(), HasSubstr("no_rope_layers: 2 entries for 4 layers"));
}

TEST(DecoderConfig, FactorsOfBlocksGoToEmbeddingsAndEpsilon) {
  const auto config =
      ReadDecoderConfig(Config("granite", R"("embedding_multiplier": 12, "logits_scaling": 8,
                                             "residual_multiplier": 0.5, "rms_norm_eps": 0.25,
                                             "attention_multiplier": 0.125)"));
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->hidden_scale(), 24);
  EXPECT_EQ(config->hidden_epsilon(), 1);
  EXPECT_EQ(config->logit_scale, 0.125F);
  EXPECT_EQ(config->layer(3).score_scale, 0.125F);
  const auto none = ReadDecoderConfig(Config("granite", R"("residual_multiplier": 0)"));
  EXPECT_THAT(none.status().message(), HasSubstr("residual_multiplier: expected a number in"));
}

TEST(DecoderConfig, LongRopeIsLimitedToTheTrainedContext) {
  const std::string rope =
      R"("max_position_embeddings": 512, "original_max_position_embeddings": 64,
      "rope_scaling": {"type": "su", "long_factor": [9, 9, 9, 9, 9, 9, 9, 9], "short_factor": )";
  const auto config = ReadDecoderConfig(Config("phi3", rope + "[1, 1, 1, 1, 1, 1, 1, 2]}"));
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->max_positions, 64);
  EXPECT_THAT(config->notes,
              ElementsAre(HasSubstr("long_factor: not used; the context is the 64")));
  EXPECT_NEAR(config->rotary(0)->attention_factor, std::sqrt(1.5), 1e-6);
  EXPECT_NEAR(config->rotary(0)->inverse_frequencies[7], std::pow(1e4, -14.0 / 16) / 2, 1e-9);
  const auto few = ReadDecoderConfig(Config("phi3", rope + "[1, 1]}"));
  EXPECT_THAT(few.status().message(), HasSubstr("short_factor: 2 entries for 8 pairs"));
}

TEST(DecoderConfig, TheMethodOfDeepseekV2DecidesAboutGroups) {
  const std::string groups = R"("n_group": 4, "topk_group": 2, "topk_method": )";
  const auto greedy = ReadDecoderConfig(Config("deepseek_v2", groups + R"("greedy")"));
  ASSERT_TRUE(greedy.ok()) << greedy.status().message();
  EXPECT_EQ(greedy->router.groups, 1);
  EXPECT_FALSE(greedy->router.normalize);
  const auto limited =
      ReadDecoderConfig(Config("deepseek_v2", groups + R"("group_limited_greedy")"));
  ASSERT_TRUE(limited.ok()) << limited.status().message();
  EXPECT_EQ(limited->router.groups, 4);
  EXPECT_EQ(limited->router.top_groups, 2);
  EXPECT_EQ(limited->router.best_of_group, 1);
  const auto other = ReadDecoderConfig(Config("deepseek_v2", groups + R"("noaux_tc")"));
  EXPECT_THAT(other.status().message(), HasSubstr("topk_method: 'noaux_tc' is neither"));
}

TEST(DecoderConfig, LayersOfErnieInARangeHaveExperts) {
  const auto sparse = [](const std::string& more) {
    const auto config = ReadDecoderConfig(Config("ernie4_5_moe", more));
    EXPECT_TRUE(config.ok()) << config.status().message();
    std::vector<int64_t> layers;
    for (int64_t layer = 0; config.ok() && layer < 4; ++layer) {
      if (IsSparse(*config->family, config->shape, layer)) layers.push_back(layer);
    }
    return layers;
  };
  EXPECT_THAT(sparse(R"("use_bias": false)"), ElementsAre(1, 2, 3));
  EXPECT_THAT(sparse(R"("moe_layer_end_index": 2)"), ElementsAre(1, 2));
  EXPECT_THAT(sparse(R"("moe_layer_start_index": 0, "moe_layer_interval": 2)"), ElementsAre(1, 3));
}

TEST(DecoderConfig, LayersOfHunyuanHaveEqualNumbersOfExperts) {
  const auto read = [](const std::string& topk) {
    std::string config = Config("hunyuan_v1_moe", R"("moe_topk": )" + topk);
    const std::string other = R"("num_experts_per_tok": 2, )";
    return ReadDecoderConfig(config.erase(config.find(other), other.size()));
  };
  const auto equal = read("[3, 3, 3, 3]");
  ASSERT_TRUE(equal.ok()) << equal.status().message();
  EXPECT_EQ(equal->router.top_k, 3);
  for (const char* const unequal : {"[3, 3, 2, 3]", "[3, 3]", "[]", "[9, 9, 9, 9]"}) {
    EXPECT_THAT(read(unequal).status().message(), HasSubstr("num_experts_per_tok: ")) << unequal;
  }
}

TEST(DecoderConfig, AlphaStretchesTheThetaOfHunyuan) {
  const std::string scaled = R"("rope_scaling": {"type": "dynamic", "alpha": 16.0, "factor": 1.0})";
  const auto config = ReadDecoderConfig(Config("hunyuan_v1_dense", scaled));
  ASSERT_TRUE(config.ok()) << config.status().message();
  const std::vector<float>& frequencies = config->rotaries[0].inverse_frequencies;
  ASSERT_EQ(frequencies.size(), 8U);
  // 16^(16 / 14) of theta, to the power -2 / 16.
  EXPECT_NEAR(frequencies[1], std::pow(10000.0 * std::pow(16.0, 16.0 / 14), -0.125), 1e-7);
  EXPECT_THAT(ReadDecoderConfig(Config("llama", scaled)).status().message(),
              HasSubstr("alpha: 16.0 is not understood"));
}

TEST(DecoderConfig, AnIndexLimitsTheContext) {
  const std::string sizes = R"("n_routed_experts": 8, "n_group": 1, "topk_group": 1,
                               "index_n_heads": 2, "index_head_dim": 32, "index_topk": )";
  const auto limited = ReadDecoderConfig(Config("deepseek_v32", sizes + "100"));
  ASSERT_TRUE(limited.ok()) << limited.status().message();
  EXPECT_EQ(limited->max_positions, 100);
  ASSERT_EQ(limited->notes.size(), 1U);
  EXPECT_THAT(limited->notes[0],
              HasSubstr("index_topk: the context is limited from 163840 to 100"));
  const auto whole =
      ReadDecoderConfig(Config("deepseek_v32", sizes + R"(100, "max_position_embeddings": 64)"));
  ASSERT_TRUE(whole.ok()) << whole.status().message();
  EXPECT_EQ(whole->max_positions, 64);
  EXPECT_TRUE(whole->notes.empty());
}

TEST(DecoderConfig, SomeLayersHaveNoIndexerOfTheirOwn) {
  const auto indexers = [](const std::string& more) {
    const auto config = ReadDecoderConfig(Config("glm_moe_dsa", more));
    EXPECT_TRUE(config.ok()) << config.status().message();
    std::vector<int64_t> layers;
    for (int64_t layer = 0; config.ok() && layer < 4; ++layer) {
      if (config->layer(layer).sizes.index_dim > 0) layers.push_back(layer);
    }
    return layers;
  };
  EXPECT_THAT(indexers(R"("attention_bias": false)"), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(indexers(R"("indexer_types": ["full", "shared", "shared", "full"])"),
              ElementsAre(0, 3));
  EXPECT_THAT(indexers(R"("index_topk_pattern": "FSFS")"), ElementsAre(0, 2));
  EXPECT_THAT(indexers(R"("index_topk_freq": 2)"), ElementsAre(0, 1, 3));
  EXPECT_THAT(
      ReadDecoderConfig(Config("glm_moe_dsa", R"("indexer_types": ["full"])")).status().message(),
      HasSubstr("indexer_types: 1 entries for 4 layers"));
}

}  // namespace
}  // namespace marlin::decoder_config_test
