#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "marlin/recipe.h"
#include "recipe/glob.h"

namespace marlin::layer_class_test {
namespace {

using ::testing::HasSubstr;

struct NameCase {
  const char* name;
  const char* layer_class;
};

// Tensor names in the model families' checkpoints on Hugging Face.
constexpr NameCase kNames[] = {
    // llama, mistral, qwen2, qwen3
    {"model.embed_tokens.weight", "embedding"},
    {"lm_head.weight", "lm_head"},
    {"model.norm.weight", "norm"},
    {"model.layers.0.input_layernorm.weight", "norm"},
    {"model.layers.31.post_attention_layernorm.weight", "norm"},
    {"model.layers.0.self_attn.q_proj.weight", "attention_qkv"},
    {"model.layers.0.self_attn.k_proj.bias", "attention_qkv"},
    {"model.layers.0.self_attn.v_proj.weight", "attention_qkv"},
    {"model.layers.0.self_attn.o_proj.weight", "attention_out"},
    {"model.layers.0.self_attn.q_norm.weight", "norm"},
    {"model.layers.0.mlp.gate_proj.weight", "mlp_gate"},
    {"model.layers.0.mlp.up_proj.weight", "mlp_up"},
    {"model.layers.0.mlp.down_proj.weight", "mlp_down"},
    // qwen2_moe, qwen3_moe
    {"model.layers.0.mlp.gate.weight", "moe_router"},
    {"model.layers.0.mlp.experts.17.gate_proj.weight", "moe_expert"},
    {"model.layers.0.mlp.experts.17.down_proj.weight", "moe_expert"},
    {"model.layers.0.mlp.experts.gate_up_proj", "moe_expert"},
    {"model.layers.0.mlp.shared_expert.up_proj.weight", "moe_shared_expert"},
    {"model.layers.0.mlp.shared_expert_gate.weight", "moe_router"},
    // mixtral
    {"model.layers.3.block_sparse_moe.gate.weight", "moe_router"},
    {"model.layers.3.block_sparse_moe.experts.7.w1.weight", "moe_expert"},
    {"model.layers.3.block_sparse_moe.experts.7.w2.weight", "moe_expert"},
    // glm4, glm4_moe and its multi-head latent attention sibling, deepseek_v3
    {"model.layers.0.mlp.gate_up_proj.weight", "mlp_gate"},
    {"model.layers.0.post_self_attn_layernorm.weight", "norm"},
    {"model.layers.1.mlp.gate.e_score_correction_bias", "moe_router"},
    {"model.layers.1.mlp.shared_experts.down_proj.weight", "moe_shared_expert"},
    {"model.layers.1.self_attn.q_a_proj.weight", "attention_qkv"},
    {"model.layers.1.self_attn.q_a_layernorm.weight", "norm"},
    {"model.layers.1.self_attn.q_b_proj.weight", "attention_qkv"},
    {"model.layers.1.self_attn.kv_a_proj_with_mqa.weight", "attention_qkv"},
    {"model.layers.1.self_attn.kv_a_layernorm.weight", "norm"},
    {"model.layers.1.self_attn.kv_b_proj.weight", "attention_qkv"},
    {"model.layers.61.eh_proj.weight", "other"},
    {"model.layers.61.enorm.weight", "norm"},
    {"model.layers.61.shared_head.head.weight", "lm_head"},
    // gpt_oss
    {"model.layers.0.mlp.router.weight", "moe_router"},
    {"model.layers.0.mlp.router.bias", "moe_router"},
    {"model.layers.0.mlp.experts.down_proj_bias", "moe_expert"},
    {"model.layers.0.self_attn.sinks", "other"},
    // phi3
    {"model.layers.0.self_attn.qkv_proj.weight", "attention_qkv"},
    // gpt2 and gpt_neox
    {"transformer.wte.weight", "embedding"},
    {"wte.weight", "embedding"},
    {"wpe.weight", "embedding"},
    {"transformer.h.0.ln_1.weight", "norm"},
    {"ln_f.bias", "norm"},
    {"h.0.attn.c_attn.weight", "attention_qkv"},
    {"transformer.h.0.attn.c_proj.weight", "attention_out"},
    {"transformer.h.0.mlp.c_fc.weight", "mlp_up"},
    {"transformer.h.0.mlp.c_proj.weight", "mlp_down"},
    {"gpt_neox.layers.0.attention.query_key_value.weight", "attention_qkv"},
    {"gpt_neox.layers.0.attention.dense.weight", "attention_out"},
    {"gpt_neox.layers.0.mlp.dense_h_to_4h.weight", "mlp_up"},
    // wrapped decoders and their siblings
    {"model.language_model.layers.0.self_attn.q_proj.weight", "attention_qkv"},
    {"vision_tower.encoder.layers.0.self_attn.q_proj.weight", "other"},
    {"model.visual.blocks.0.mlp.up_proj.weight", "other"},
    {"mtp.pre_fc_norm_embedding.weight", "norm"},
    {"mtp.layers.0.self_attn.q_proj.weight", "attention_qkv"},
    {"mtp.layers.0.mlp.shared_expert.up_proj.weight", "moe_shared_expert"},
    {"mtp.fc.weight", "other"},
    {"model.connector.modality_projection.proj.weight", "other"},
    {"model.embed_vision.embedding_projection.weight", "other"},
    {"mm_projector.proj.0.weight", "other"},
    {"something.else.weight", "other"},
    {"", "other"},
};

TEST(LayerClass, KnowsTheNamesOfModelFamilies) {
  for (const NameCase& entry : kNames) {
    EXPECT_EQ(LayerClassName(ClassifyTensor(entry.name)), entry.layer_class) << entry.name;
  }
}

TEST(LayerClass, NamesRoundTrip) {
  for (int i = 0; i < kLayerClassCount; ++i) {
    const auto layer_class = static_cast<LayerClass>(i);
    const Result<LayerClass> parsed = ParseLayerClass(LayerClassName(layer_class));
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(*parsed, layer_class);
  }
  const Status unknown = ParseLayerClass("experts").status();
  EXPECT_EQ(unknown.code(), Code::kInvalidArgument);
  EXPECT_THAT(unknown.message(), HasSubstr("'experts'"));
  EXPECT_THAT(unknown.message(), HasSubstr("moe_expert"));
}

TEST(LayerClass, OnlyMatricesAreWeightMatrices) {
  EXPECT_TRUE(IsWeightMatrix("model.layers.0.mlp.up_proj.weight", {64, 32}));
  EXPECT_TRUE(IsWeightMatrix("model.layers.0.mlp.experts.gate_up_proj", {8, 64, 32}));
  EXPECT_FALSE(IsWeightMatrix("model.layers.0.mlp.up_proj.weight", {64}));
  EXPECT_FALSE(IsWeightMatrix("model.layers.0.mlp.up_proj.weight", {0, 32}));
  EXPECT_FALSE(IsWeightMatrix("model.layers.0.mlp.up_proj.bias", {64}));
  EXPECT_FALSE(IsWeightMatrix("model.layers.0.mlp.experts.gate_up_proj_bias", {8, 64}));
  EXPECT_FALSE(IsWeightMatrix("model.layers.0.self_attn.q_proj.weight_scale_inv", {4, 4}));
  EXPECT_FALSE(IsWeightMatrix("model.layers.0.mlp.experts.gate_up_proj_scales", {8, 64, 4}));
  EXPECT_FALSE(IsWeightMatrix("model.conv.weight", {8, 4, 3}));
}

TEST(Glob, MatchesWholeNames) {
  EXPECT_TRUE(GlobMatch("*", ""));
  EXPECT_TRUE(GlobMatch("a*c", "abbc"));
  EXPECT_TRUE(GlobMatch("*.layers.?.*", "model.layers.3.mlp"));
  EXPECT_FALSE(GlobMatch("*.layers.?.*", "model.layers.13.mlp"));
  EXPECT_FALSE(GlobMatch("a*c", "abcd"));
  EXPECT_FALSE(GlobMatch("", "a"));
  EXPECT_TRUE(GlobMatch("*a*b*c*", "xxaxxbxxcxx"));
}

TEST(Glob, ManyStarsStayCheap) {
  std::string pattern;
  for (int i = 0; i < 500; ++i) pattern += "*a";
  pattern += "b";
  EXPECT_FALSE(GlobMatch(pattern, std::string(1024, 'a')));
}

}  // namespace
}  // namespace marlin::layer_class_test
