#include "recipe/typed_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "recipe/decoder_shape.h"
#include "recipe/rope_parameters.h"
#include "recipe/text_config.h"

namespace marlin::typed_config_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Result<TypedConfig> Read(const std::string& type, Json keys,
                         UnknownKeys unknown = UnknownKeys::kRefuse) {
  keys["model_type"] = type;
  return ReadTypedConfig(ModelConfig::Of(std::move(keys), "config.json"), unknown);
}

Json Values(const std::string& type, Json keys) {
  const Result<TypedConfig> typed = Read(type, std::move(keys));
  EXPECT_TRUE(typed.ok()) << typed.status().message();
  return typed.ok() ? typed->config.values() : Json();
}

void ExpectRefused(const std::string& type, Json keys, const char* message) {
  const std::string text = keys.dump();
  const Result<TypedConfig> typed = Read(type, std::move(keys));
  ASSERT_FALSE(typed.ok()) << text;
  EXPECT_THAT(typed.status().message(), HasSubstr(message));
}

Result<RopeParameters> Rope(const std::string& type, Json keys,
                            RopeKind kind = RopeKind::kFullAttention) {
  Result<TypedConfig> typed = Read(type, std::move(keys));
  if (!typed.ok()) return typed.status();
  return ReadRopeParameters(*typed, kind);
}

void ExpectRopeRefused(const std::string& type, Json keys, const char* message) {
  const std::string text = keys.dump();
  const Result<RopeParameters> rope = Rope(type, std::move(keys));
  ASSERT_FALSE(rope.ok()) << text;
  EXPECT_THAT(rope.status().message(), HasSubstr(message));
}

TEST(TypedConfig, MissingKeysHaveTheDefaultsOfTheType) {
  EXPECT_EQ(Values("mixtral", Json::object())["rms_norm_eps"], 1e-5);
  EXPECT_EQ(Values("qwen3_moe", Json::object())["rms_norm_eps"], 1e-6);
  EXPECT_EQ(Values("mixtral", Json::object())["rope_theta"], 1e6);
  EXPECT_EQ(Values("glm4_moe", Json::object())["partial_rotary_factor"], 0.5);
  EXPECT_EQ(Values("deepseek_v3", Json::object())["routed_scaling_factor"], 2.5);
  EXPECT_EQ(Values("mistral", Json::object())["sliding_window"], 4096);
  EXPECT_EQ(Values("glm4", Json::object())["attention_bias"], true);
  for (const Family& family : AllFamilies()) {
    EXPECT_FALSE(TypeDefaults(family.model_type).empty()) << family.model_type;
  }
}

TEST(TypedConfig, SizesAreNeverMadeUp) {
  for (const char* key : {"hidden_size", "intermediate_size", "num_attention_heads",
                          "num_hidden_layers", "vocab_size"}) {
    EXPECT_FALSE(Values("llama", Json::object()).contains(key)) << key;
    EXPECT_EQ(Values("llama", {{key, 8}})[key], 8);
  }
}

TEST(TypedConfig, ANullIsNoMissingKey) {
  EXPECT_TRUE(Values("mistral", {{"sliding_window", nullptr}})["sliding_window"].is_null());
  EXPECT_TRUE(
      Values("mistral", {{"num_key_value_heads", nullptr}})["num_key_value_heads"].is_null());
  // Keys of RoPE are absent where they are null.
  EXPECT_EQ(Values("mixtral", {{"rope_theta", nullptr}})["rope_theta"], 1e6);
}

TEST(TypedConfig, SynonymsAreReadAndMustAgree) {
  EXPECT_EQ(Values("mixtral", {{"num_experts", 4}})["num_local_experts"], 4);
  EXPECT_EQ(Values("glm4_moe", {{"num_local_experts", 4}})["n_routed_experts"], 4);
  EXPECT_EQ(Values("glm4_moe", {{"num_mtp_layers", 3}})["num_nextn_predict_layers"], 3);
  ExpectRefused("mixtral", {{"num_experts", 4}, {"num_local_experts", 8}},
                "num_experts: 4, but num_local_experts is 8");
  ExpectRefused("gpt_oss", {{"experts_per_token", 2}}, "experts_per_token: 2 is not understood");
  EXPECT_EQ(Values("gpt_oss", {{"experts_per_token", 4}})["num_experts_per_tok"], 4);
  ExpectRefused("deepseek_v3", {{"head_dim", 32}}, "head_dim: 32");
  ExpectRefused("deepseek_v3", {{"qk_head_dim", 32}}, "qk_head_dim: 32");
}

TEST(TypedConfig, UnknownKeysAreRefusedWhereTheyMayChangeResults) {
  for (const char* key : {"rope_ratio", "logit_scale", "attn_logit_softcapping", "clip_qkv",
                          "residual_multiplier", "sliding_window", "moe_gate_norm", "scale_depth",
                          "attention_chunk_size", "query_pre_attn_scalar_norm", "norm_eps"}) {
    SCOPED_TRACE(key);
    ExpectRefused("llama", {{key, 2.5}}, key);
    // A feature that is off changes nothing.
    EXPECT_TRUE(Read("llama", {{key, nullptr}}).ok());
    EXPECT_TRUE(Read("llama", {{key, false}}).ok());
    EXPECT_TRUE(Read("llama", {{key, 2.5}}, UnknownKeys::kIgnore).ok());
  }
  ExpectRefused("llama", {{"is_causal", false}}, "is_causal: false");
  ExpectRefused("deepseek_v3", {{"scoring_func", "softmax"}}, "scoring_func");
  ExpectRefused("deepseek_v3", {{"moe_layer_freq", 2}}, "moe_layer_freq");
  ExpectRefused("deepseek_v2", {{"norm_topk_prob", true}}, "norm_topk_prob");
  ExpectRefused("minimax_m2", {{"attn_type_list", {1, 0, 1}}}, "attn_type_list");
  ExpectRefused("hunyuan_v1_moe", {{"num_shared_expert", {1, 2}}}, "num_shared_expert");
  ExpectRefused("ernie4_5_moe", {{"use_bias", true}}, "use_bias: true");
  ExpectRefused("mistral", {{"num_hidden_layers", 1}, {"layer_types", {"full_attention"}}},
                "layer_types");
  const Result<TypedConfig> other = Read("llama", {{"my_notes", 3}, {"max_steps", 7}});
  ASSERT_TRUE(other.ok()) << other.status().message();
  EXPECT_THAT(other->ignored, ElementsAre("max_steps", "my_notes"));
}

/// Configs as their makers published them, in the keys that are not common.
TEST(TypedConfig, PublishedConfigsAreRead) {
  const std::pair<const char*, Json> configs[] = {
      {"llama",
       {{"is_llama_config", true},
        {"rope_interleaved", false},
        {"pretraining_tp", 1},
        {"max_sequence_length", 2048},
        {"rope_scaling", nullptr},
        {"bias", false}}},
      {"mistral", {{"sliding_window", nullptr}, {"attention_dropout", 0.0}, {"head_dim", 128}}},
      {"mixtral", {{"router_jitter_noise", 0.0}, {"output_router_logits", false}}},
      {"qwen2", {{"use_mrope", false}, {"max_window_layers", 70}, {"sliding_window", 131072}}},
      {"qwen3_moe", {{"max_window_layers", 48}, {"mlp_only_layers", Json::array()}}},
      {"deepseek_v3",
       {{"auto_map", Json::object()},
        {"ep_size", 1},
        {"moe_layer_freq", 1},
        {"seq_aux", true},
        {"scoring_func", "sigmoid"},
        {"topk_method", "noaux_tc"},
        {"aux_loss_alpha", 0.001}}},
      {"glm4_moe_lite", {{"first_k_dense_replace", 1}, {"partial_rotary_factor", 1.0}}},
      {"gpt_oss", {{"initial_context_length", 4096}, {"experts_per_token", 4}}},
      {"deepseek_v2",
       {{"scoring_func", "softmax"},
        {"topk_method", "group_limited_greedy"},
        {"norm_topk_prob", false},
        {"moe_layer_freq", 1}}},
      {"kimi_k2",
       {{"auto_map", Json::object()}, {"scoring_func", "sigmoid"}, {"topk_method", "noaux_tc"}}},
      {"minimax_m2",
       {{"attn_type_list", {1, 1, 1}},
        {"qk_norm_type", "per_layer"},
        {"rotary_dim", 64},
        {"scoring_func", "sigmoid"},
        {"shared_intermediate_size", 0},
        {"shared_moe_mode", "sigmoid"},
        {"use_qk_norm", true},
        {"use_routing_bias", true}}},
      {"ernie4_5_moe",
       {{"moe_capacity", {64, 64, 64}}, {"moe_gate", "topk"}, {"moe_use_aux_free", true}}},
      {"hunyuan_v1_moe",
       {{"attention_head_dim", 128},
        {"head_dim", 128},
        {"moe_intermediate_size", {3072, 3072}},
        {"moe_layer_num_skipped", 0},
        {"norm_topk_prob", true},
        {"norm_type", "rms"},
        {"num_shared_expert", {1, 1}},
        {"use_mixed_mlp_moe", true},
        {"use_qk_norm", true}}},
      {"glm_moe_dsa",
       {{"indexer_rope_interleave", true},
        {"layer_types", {"indexed_attention", "indexed_attention"}},
        {"scoring_func", "sigmoid"}}},
  };
  for (const auto& [type, keys] : configs) {
    const Result<TypedConfig> typed = Read(type, keys);
    ASSERT_TRUE(typed.ok()) << typed.status().message();
    EXPECT_THAT(typed->ignored, IsEmpty()) << type;
  }
}

TEST(RopeParameters, StandWhereverAVersionPutsThem) {
  const Json yarn = {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 64}};
  const auto old = Rope("llama", {{"rope_scaling", yarn}, {"rope_theta", 5000.0}});
  ASSERT_TRUE(old.ok()) << old.status().message();
  EXPECT_EQ(old->type, RopeType::kYarn);
  EXPECT_EQ(old->theta, 5000);
  EXPECT_EQ(old->original_context, 64);
  EXPECT_EQ(old->positions, 2048);
  // A rope_scaling takes the place of rope_parameters as a whole, theta included.
  const auto both =
      Rope("llama", {{"rope_scaling", yarn},
                     {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 777.0}}}});
  ASSERT_TRUE(both.ok());
  EXPECT_EQ(both->type, RopeType::kYarn);
  EXPECT_EQ(both->theta, 10000);
  const auto empty = Rope(
      "llama", {{"rope_scaling", Json::object()}, {"rope_parameters", {{"rope_theta", 777.0}}}});
  ASSERT_TRUE(empty.ok());
  EXPECT_EQ(empty->theta, 777);
  // The trained context at the top precedes the one inside.
  const auto top =
      Rope("llama", {{"rope_scaling", yarn}, {"original_max_position_embeddings", 32}});
  ASSERT_TRUE(top.ok());
  EXPECT_EQ(top->original_context, 32);
  const auto inside = Rope("glm4", {{"partial_rotary_factor", 0.25},
                                    {"rope_parameters", {{"partial_rotary_factor", 1.0}}}});
  ASSERT_TRUE(inside.ok());
  EXPECT_EQ(inside->partial, 1);
}

TEST(RopeParameters, MayBeForEachLayerType) {
  const Json one = {{"rope_type", "linear"}, {"factor", 2.0}, {"rope_theta", 500.0}};
  const auto equal =
      Rope("qwen3", {{"rope_parameters", {{"full_attention", one}, {"sliding_attention", one}}}});
  ASSERT_TRUE(equal.ok()) << equal.status().message();
  EXPECT_EQ(equal->theta, 500);
  EXPECT_EQ(equal->type, RopeType::kLinear);
  Json other = one;
  other["factor"] = 3.0;
  const Json both = {{"rope_parameters", {{"full_attention", one}, {"sliding_attention", other}}}};
  EXPECT_EQ(Rope("qwen3", both)->factor, 2);
  EXPECT_EQ(Rope("qwen3", both, RopeKind::kSlidingAttention)->factor, 3);
  ExpectRopeRefused("deepseek_v32", {{"rope_parameters", {{"full_attention", one}}}},
                    "rope_parameters: full_attention: a deepseek_v32 has no kinds of layers");
  ExpectRopeRefused("llama", {{"rope_parameters", {{"full_attention", one}}}},
                    "rope_parameters: full_attention: a llama has no kinds of layers");
}

TEST(RopeParameters, SlidingLayersMayHaveATheta) {
  const auto sliding = [](Json keys) {
    return *Rope("gemma3_text", std::move(keys), RopeKind::kSlidingAttention);
  };
  EXPECT_EQ(Rope("gemma3_text", {})->theta, 1e6);
  EXPECT_EQ(sliding({}).theta, 1e4);
  const Json old = {{"rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}},
                    {"rope_theta", 5e5},
                    {"rope_local_base_freq", 2e4}};
  EXPECT_EQ(Rope("gemma3_text", old)->theta, 5e5);
  EXPECT_EQ(Rope("gemma3_text", old)->factor, 8);
  EXPECT_EQ(sliding(old).theta, 2e4);
  EXPECT_EQ(sliding(old).type, RopeType::kDefault);
  const Json own = {{"rope_parameters",
                     {{"full_attention", {{"rope_type", "default"}}},
                      {"sliding_attention", {{"rope_theta", 3e4}}}}}};
  EXPECT_EQ(Rope("gemma3_text", own)->theta, 1e6);
  EXPECT_EQ(sliding(own).theta, 3e4);
  ExpectRopeRefused("gemma3_text", {{"rope_parameters", {{"rope_theta", 5e5}}}},
                    "expected an object for each kind of layers");
}

TEST(RopeParameters, ProportionalRotatesAPartOfThePairs) {
  const auto rope = Rope("gemma4_text", {});
  ASSERT_TRUE(rope.ok()) << rope.status().message();
  EXPECT_EQ(rope->type, RopeType::kProportional);
  EXPECT_EQ(rope->partial, 0.25);
  EXPECT_EQ(Rope("gemma4_text", {}, RopeKind::kSlidingAttention)->theta, 1e4);
}

TEST(RopeParameters, ScalingExtendsTheContext) {
  const auto positions = [](Json scaling) {
    const auto rope =
        Rope("qwen2", {{"max_position_embeddings", 128}, {"rope_scaling", std::move(scaling)}});
    EXPECT_TRUE(rope.ok()) << rope.status().message();
    return rope.ok() ? rope->positions : 0;
  };
  EXPECT_EQ(
      positions({{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 128}}),
      512);
  EXPECT_EQ(
      positions({{"type", "yarn"}, {"factor", 2.0}, {"original_max_position_embeddings", 32}}),
      128);
  EXPECT_EQ(positions({{"type", "linear"}, {"factor", 4.0}}), 512);
  EXPECT_EQ(positions({{"type", "dynamic"}, {"factor", 4.0}}), 128);
  EXPECT_EQ(positions(nullptr), 128);
}

TEST(RopeParameters, RefusalsNameTheKey) {
  const auto refused = [](Json scaling, const char* message) {
    ExpectRopeRefused("llama", {{"rope_scaling", std::move(scaling)}}, message);
  };
  refused({{"type", "yarn"}}, "rope_scaling: factor: the key is missing");
  refused({{"type", "linear"}}, "rope_scaling: factor: the key is missing");
  refused({{"type", "llama3"}, {"factor", 8.0}}, "low_freq_factor: the key is missing");
  refused(
      {{"type", "llama3"}, {"factor", 8.0}, {"low_freq_factor", 4.0}, {"high_freq_factor", 3.5}},
      "high_freq_factor: 3.5 is below low_freq_factor 4");
  refused({{"type", "axial"}, {"factor", 8.0}}, "rope_type 'axial' is not supported");
  refused({{"type", "longrope"}, {"factor", 8.0}}, "short_factor: longrope needs one for every");
  refused({{"type", "longrope"}, {"short_factor", {1.0, 0.0}}}, "short_factor: ");
  refused({{"type", "yarn"}, {"factor", 2.0}, {"stretch", 1.5}},
          "rope_scaling: stretch: 1.5 is not understood");
  refused({{"type", "yarn"}, {"factor", 2.0}, {"attn_factor", 1.5}}, "attn_factor: 1.5");
  ExpectRopeRefused("llama", {{"partial_rotary_factor", 0.5}},
                    "partial_rotary_factor: 0.5, but a llama rotates whole heads");
}

Json Sizes() {
  return {{"hidden_size", 64},
          {"intermediate_size", 96},
          {"num_attention_heads", 4},
          {"num_hidden_layers", 2},
          {"vocab_size", 99}};
}

TEST(TextConfig, IsReadAsTheTextModelsType) {
  Json text = Sizes();
  text["rms_norm_eps"] = 1e-3;
  const Json whole = {{"text_config", text},
                      {"vision_config", {{"hidden_size", 7}}},
                      {"image_token_id", 5},
                      {"projector_hidden_act", "gelu"},
                      {"eos_token_id", 9}};
  const Result<TypedConfig> typed = Read("qwen3_vl", whole);
  ASSERT_TRUE(typed.ok()) << typed.status().message();
  EXPECT_EQ(typed->family->model_type, "qwen3_vl_text");
  EXPECT_EQ(typed->config.values()["hidden_size"], 64);
  EXPECT_EQ(typed->config.values()["rms_norm_eps"], 1e-3);
  EXPECT_EQ(typed->config.values()["tie_word_embeddings"], false);
  EXPECT_EQ(typed->source.values()["eos_token_id"], 9);
  EXPECT_THAT(typed->ignored, IsEmpty());
  // Only a text_config may lack sizes.
  text.erase("vocab_size");
  EXPECT_EQ(Values("qwen3_vl", {{"text_config", text}})["vocab_size"], 151936);
  EXPECT_FALSE(Values("qwen2_vl", text).contains("vocab_size"));
  EXPECT_EQ(Values("qwen2_vl", text)["hidden_size"], 64);
}

TEST(TextConfig, ItsTypeIsItsOwnOrTheUsualOne) {
  EXPECT_EQ(TextModelType({{"model_type", "llava"}}), "llama");
  EXPECT_EQ(TextModelType({{"model_type", "llava"}, {"text_config", {{"model_type", "mistral"}}}}),
            "mistral");
  EXPECT_EQ(
      TextModelType({{"model_type", "qwen2_vl"}, {"text_config", {{"model_type", "qwen2_vl"}}}}),
      "qwen2_vl_text");
  EXPECT_EQ(TextModelType({{"model_type", "qwen3"}}), "qwen3");
  EXPECT_EQ(TextModelType(Json()), "");
  ExpectRefused("llava", {{"text_config", {{"model_type", "opt"}}}}, "'opt'");
}

TEST(TextConfig, KeysNextToItAreReadOrRefused) {
  const Json text = Sizes();
  ExpectRefused("qwen3_vl", {{"text_config", text}, {"hidden_size", 65}},
                "hidden_size: 65 next to");
  ExpectRefused("qwen3_vl", {{"text_config", text}, {"head_dim", 65}}, "head_dim: 65 next to");
  ExpectRefused("qwen3_vl", {{"text_config", text}, {"logit_scale", 2}}, "logit_scale");
  ExpectRefused("qwen3_vl", {{"text_config", 1}}, "text_config: expected an object");
  ExpectRefused("qwen3_vl", {{"hidden_size", 64}}, "text_config: the key is missing");
  const Json same = {{"text_config", text}, {"hidden_size", 64}, {"head_dim", 128}};
  EXPECT_TRUE(Read("qwen3_vl", same).ok());
}

TEST(TextConfig, TheWholeModelsHeadIsTied) {
  Json text = Sizes();
  text["tie_word_embeddings"] = true;
  EXPECT_EQ(Values("qwen3_vl", {{"text_config", text}})["tie_word_embeddings"], false);
  EXPECT_EQ(Values("internvl", {{"text_config", Sizes()}})["tie_word_embeddings"], true);
  Json whole = {{"model_type", "llava"}, {"text_config", text}, {"tie_word_embeddings", true}};
  EXPECT_TRUE(TiesEmbeddings(whole));
  UntieTextConfig(&whole);
  EXPECT_FALSE(TiesEmbeddings(whole));
  EXPECT_EQ(whole["text_config"]["tie_word_embeddings"], false);
}

TEST(TextConfig, NamesOfItsTensors) {
  EXPECT_EQ(TextTensorName("model.language_model.layers.0.x"), "model.layers.0.x");
  EXPECT_EQ(TextTensorName("language_model.model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(TextTensorName("language_model.lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(TextTensorName("model.visual.x"), "model.visual.x");
  EXPECT_EQ(TextTensorPrefix("model.text_model.norm.weight"), "model.text_model.");
  EXPECT_EQ(TextTensorPrefix("model.norm.weight"), "");
  EXPECT_EQ(OtherPart("model.visual.blocks.0.x"), "model.visual");
  EXPECT_EQ(OtherPart("vision_tower.x"), "vision_tower");
  EXPECT_EQ(OtherPart("model.image_newline"), "model.image_newline");
  EXPECT_EQ(OtherPart("model.layers.0.visual.x"), "");
}

}  // namespace
}  // namespace marlin::typed_config_test
