// Configurations of types with Mamba-2 mixers or short convolutions: which layer has what.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/json.h"
#include "model/decoder_config.h"

namespace marlin::hybrid_config_test {
namespace {

using ::testing::HasSubstr;

Json Config(const std::string& type, const Json& own) {
  Json config = {{"model_type", type},       {"hidden_size", 64},        {"intermediate_size", 96},
                 {"num_hidden_layers", 3},   {"vocab_size", 64},         {"num_attention_heads", 4},
                 {"num_key_value_heads", 2}, {"num_experts_per_tok", 2}, {"mamba_n_heads", 8},
                 {"mamba_n_groups", 2},      {"mamba_d_state", 12}};
  if (type != "granitemoehybrid") {
    for (const char* const key : {"mamba_n_heads", "mamba_n_groups", "mamba_d_state"}) {
      config.erase(key);
    }
  }
  if (own.is_object()) config.update(own);
  return config;
}

DecoderConfig Read(const std::string& type, const Json& own) {
  const Result<DecoderConfig> config = ReadDecoderConfig(Config(type, own).dump());
  EXPECT_TRUE(config.ok()) << config.status().message();
  return config.ok() ? *config : DecoderConfig();
}

void ExpectRefused(const std::string& type, const Json& own, Code code, const std::string& text) {
  const Status status = ReadDecoderConfig(Config(type, own).dump()).status();
  EXPECT_EQ(status.code(), code) << text;
  EXPECT_THAT(status.message(), HasSubstr(text));
}

/// A letter for each layer: a for attention, otherwise l; without a mixer -.
std::string Mixers(const DecoderConfig& config) {
  std::string letters;
  for (const LayerConfig& layer : config.layers) {
    const bool attends = layer.mixer == MixerKind::kAttention;
    letters += !layer.mixes ? '-' : attends ? 'a' : 'l';
  }
  return letters;
}

TEST(HybridConfig, LayersHaveTheMixersOfTheirTypes) {
  EXPECT_EQ(Mixers(Read("lfm2", {})), "aaa");
  EXPECT_EQ(Mixers(Read("lfm2", {{"full_attn_idxs", {1}}})), "lal");
  EXPECT_EQ(Mixers(Read("lfm2", {{"layer_types", {"conv", "full_attention", "conv"}}})), "lal");
  EXPECT_EQ(Mixers(Read("granitemoehybrid", {})), "lll");
  const Json old = {"mamba", "attention", "mamba"};
  EXPECT_EQ(Mixers(Read("granitemoehybrid", {{"layer_types", old}})), "lal");
  EXPECT_EQ(Mixers(Read("granitemoehybrid", {{"layers_block_type", old}})), "lal");
  ExpectRefused("lfm2", {{"layer_types", {"mamba", "conv", "conv"}}}, Code::kUnsupported,
                "layer_types: 'mamba' is not supported");
  ExpectRefused("granitemoehybrid", {{"layer_types", {"mlp", "mamba", "mamba"}}},
                Code::kUnsupported, "layer_types: 'mlp' is not supported");
  ExpectRefused("granitemoehybrid", {{"layer_types", {"mamba"}}}, Code::kMalformedFile,
                "layer_types: 1 entries for 3 layers");
}

TEST(HybridConfig, MambaSizesAreChecked) {
  const Dimensions d = Read("granitemoehybrid", {}).shape;
  EXPECT_EQ(d.mamba_head_dim, 16);
  EXPECT_EQ(d.min_step, 0);
  EXPECT_EQ(d.max_step, std::numeric_limits<double>::infinity());
  ExpectRefused("granitemoehybrid", {{"mamba_n_heads", 7}}, Code::kMalformedFile,
                "mamba_n_heads: 7 heads are not the 128 features of mamba_expand");
  ExpectRefused("granitemoehybrid", {{"mamba_d_head", 15}}, Code::kMalformedFile,
                "mamba_n_heads: 8 heads are not the 128 features of mamba_expand");
  ExpectRefused("granitemoehybrid", {{"mamba_n_groups", 3}}, Code::kMalformedFile,
                "mamba_n_heads: 8 are not a multiple of mamba_n_groups 3");
  ExpectRefused("granitemoehybrid", {{"mamba_d_conv", 17}}, Code::kMalformedFile, "mamba_d_conv: ");
  ExpectRefused("granitemoehybrid", {{"hidden_act", "relu"}}, Code::kMalformedFile, "hidden_act: ");
  ExpectRefused("granitemoehybrid", {{"time_step_limit", {2, 1}}}, Code::kMalformedFile,
                "time_step_limit: ");
  ExpectRefused("granitemoehybrid", {{"position_embedding_type", "alibi"}}, Code::kMalformedFile,
                "position_embedding_type: 'alibi' is neither rope nor nope");
}

TEST(HybridConfig, StepsMayHaveNoLimit) {
  std::string text = Config("granitemoehybrid", {{"time_step_limit", {0.25, 8}}}).dump();
  const std::string limit = "[0.25,8]";
  for (const char* const other : {"[0.25,Infinity]", R"([0.25,{"__float__":"Infinity"}])"}) {
    std::string written = text;
    written.replace(written.find(limit), limit.size(), other);
    const Result<DecoderConfig> config = ReadDecoderConfig(written);
    ASSERT_TRUE(config.ok()) << config.status().message();
    EXPECT_EQ(config->shape.min_step, 0.25);
    EXPECT_EQ(config->shape.max_step, std::numeric_limits<double>::infinity());
  }
}

TEST(HybridConfig, GraniteRotatesIfAsked) {
  EXPECT_EQ(Read("granitemoehybrid", {}).layers[0].rotary, kNoRotary);
  EXPECT_EQ(Read("granitemoehybrid", {{"position_embedding_type", "nope"}}).layers[0].rotary,
            kNoRotary);
  EXPECT_EQ(Read("granitemoehybrid", {{"position_embedding_type", "rope"}}).layers[0].rotary, 0U);
}

TEST(HybridConfig, WidthsOfMlpsFollowTheirRules) {
  EXPECT_EQ(Read("lfm2", {{"block_multiple_of", 32}}).shape.intermediate, 64);
  EXPECT_EQ(Read("lfm2", {}).shape.intermediate, 256);
  EXPECT_EQ(Read("lfm2", {{"block_auto_adjust_ff_dim", false}}).shape.intermediate, 96);
  const Json dense = {{"num_local_experts", 0}, {"shared_intermediate_size", 48}};
  const Dimensions granite = Read("granitemoehybrid", dense).shape;
  EXPECT_EQ(granite.intermediate, 48);
  EXPECT_EQ(granite.experts, 0);
  ExpectRefused("lfm2", {{"conv_L_cache", 1}}, Code::kMalformedFile, "conv_L_cache: ");
  ExpectRefused("lfm2", {{"block_use_swiglu", false}}, Code::kUnsupported, "block_use_swiglu: ");
}

TEST(HybridConfig, NemotronHasOneBlockPerLayer) {
  const DecoderConfig config = Read("nemotron_h", {{"hybrid_override_pattern", "M-M*E"}});
  EXPECT_EQ(Mixers(config), "l-la-");
  const Dimensions& d = config.shape;
  EXPECT_EQ(d.layers, 5);
  const std::vector<LayerBlocks> blocks = {LayerBlocks::kMixer, LayerBlocks::kMlp,
                                           LayerBlocks::kMixer, LayerBlocks::kMixer,
                                           LayerBlocks::kMlp};
  EXPECT_EQ(d.blocks, blocks);
  EXPECT_FALSE(IsSparse(*config.family, d, 1));
  EXPECT_TRUE(IsSparse(*config.family, d, 4));
  EXPECT_EQ(d.min_step, 0.001);
  // Without a layer of experts there are none.
  EXPECT_EQ(Read("nemotron_h", {{"hybrid_override_pattern", "M-"}}).shape.experts, 0);
  ExpectRefused("nemotron_h", {{"hybrid_override_pattern", "MX"}}, Code::kMalformedFile,
                "hybrid_override_pattern: 'X' is none of M, *, - and E");
  ExpectRefused("nemotron_h", {{"mlp_hidden_act", "silu"}}, Code::kUnsupported,
                "mlp_hidden_act 'silu' is not supported; supported: relu2");
  ExpectRefused("nemotron_h", {{"moe_latent_size", 32}}, Code::kUnsupported, "moe_latent_size: 32");
}

}  // namespace
}  // namespace marlin::hybrid_config_test
