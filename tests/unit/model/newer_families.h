// Keys of small models of some types, besides the sizes that all have, for families_test.cc.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "base/json.h"

namespace marlin::families_test {

using ConfigMap = std::map<std::string, Json>;

inline ConfigMap NewerConfigs() {
  return {
      {"llama4_text",
       {{"num_local_experts", 4},
        {"num_experts_per_tok", 1},
        {"intermediate_size_mlp", 80},
        {"moe_layers", {1}},
        {"no_rope_layers", {1, 0}},
        {"attention_chunk_size", 4},
        {"floor_scale", 2},
        {"attn_scale", 0.5},
        {"attention_bias", true}}},
      {"olmo3", {{"attention_bias", true}, {"sliding_window", 4}}},
      {"flex_olmo", {{"num_experts", 4}, {"norm_topk_prob", true}}},
      {"gemma", {{"hidden_act", "gelu"}}},
      {"vaultgemma", {{"sliding_window", 4}, {"query_pre_attn_scalar", 24}}},
      {"cohere", {{"attention_bias", true}}},
      {"cwm", {{"mlp_bias", true}, {"sliding_window", 4}}},
      {"solar_open", {{"n_routed_experts", 4}, {"attention_bias", true}}},
      {"exaone_moe", {{"num_experts", 4}, {"num_shared_experts", 2}, {"sliding_window", 4}}},
      {"youtu", {{"q_lora_rank", 32}, {"attention_bias", true}}},
      {"internlm3", {{"qkv_bias", true}, {"bias", true}}},
      {"iquestcoder", {{"attention_bias", true}}},
      {"hyperclovax", {{"residual_multiplier", 0.5}, {"logits_scaling", 4.0}}},
      {"hy_v3", {{"num_experts", 4}, {"attention_bias", true}}},
      {"arcee", {{"hidden_act", "relu2"}, {"mlp_bias", true}}},
      {"granitemoeshared",
       {{"num_local_experts", 4},
        {"shared_intermediate_size", 48},
        {"residual_multiplier", 0.5},
        {"attention_multiplier", 0.1}}},
      {"mellum",
       {{"num_experts", 4},
        {"layer_types", {"sliding_attention", "full_attention"}},
        {"sliding_window", 4}}},
  };
}

inline ConfigMap GemmaConfigs() {
  return {
      {"gemma2", {{"sliding_window", 4}, {"query_pre_attn_scalar", 24}}},
      {"gemma3_text", {{"sliding_window", 4}, {"sliding_window_pattern", 2}}},
      {"gemma4_text",
       {{"sliding_window", 4},
        {"global_head_dim", 32},
        {"attention_k_eq_v", true},
        {"num_global_key_value_heads", 1},
        {"hidden_size_per_layer_input", 0}}},
      {"gemma4_text/experts",
       {{"sliding_window", 4},
        {"global_head_dim", 32},
        {"hidden_size_per_layer_input", 0},
        {"enable_moe_block", true},
        {"num_experts", 4},
        {"num_experts_per_tok", nullptr},
        {"top_k_experts", 2}}},
      {"gemma4_text/embeddings",
       {{"num_hidden_layers", 4},
        {"layer_types",
         {"sliding_attention", "full_attention", "sliding_attention", "full_attention"}},
        {"sliding_window", 4},
        {"global_head_dim", 32},
        {"num_kv_shared_layers", 2},
        {"use_double_wide_mlp", true},
        {"hidden_size_per_layer_input", 16},
        {"vocab_size_per_layer_input", 70}}},
  };
}

/// Types that llama.cpp does not have, or whose names are not known here.
inline const std::set<std::string>& WithoutGgufNames() {
  static const std::set<std::string> types = {"deepseek_v32",

                                              "gemma4_text",
                                              "glm_moe_dsa",
                                              "helium",
                                              "ministral",
                                              "ministral3",
                                              "lfm2",
                                              "lfm2_moe",
                                              "nemotron_h",
                                              "granitemoehybrid",
                                              "arcee",
                                              "cohere",
                                              "cwm",
                                              "exaone_moe",
                                              "flex_olmo",
                                              "gemma",
                                              "granitemoeshared",
                                              "hy_v3",
                                              "hyperclovax",
                                              "internlm3",
                                              "iquestcoder",
                                              "llama4_text",
                                              "mellum",
                                              "olmo3",
                                              "solar_open",
                                              "vaultgemma",
                                              "youtu"};
  return types;
}

}  // namespace marlin::families_test
