#include "recipe/type_defaults.h"

namespace marlin {
namespace {

struct TypeRow {
  std::string_view model_type;
  std::string_view json;
};

constexpr TypeRow kTypeRows[] = {
    {"llama", R"({
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": null,
        "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": false, "rope_theta": 10000.0, "head_dim": null,
        "attention_bias": false, "mlp_bias": false})"},
    {"mistral", R"({
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": false, "rope_theta": 10000.0, "head_dim": null,
        "sliding_window": 4096})"},
    {"mixtral", R"({
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "tie_word_embeddings": false, "rope_theta": 1000000.0, "head_dim": null,
        "sliding_window": null, "num_local_experts": 8, "num_experts_per_tok": 2})"},
    {"phi3", R"({
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": null,
        "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
        "tie_word_embeddings": false, "rope_theta": 10000.0, "head_dim": null})"},
    {"qwen2", R"({
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": false, "rope_theta": 10000.0, "head_dim": null,
        "use_sliding_window": false, "sliding_window": 4096, "max_window_layers": 28,
        "layer_types": null})"},
    {"qwen3", R"({
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": false, "rope_theta": 10000.0, "head_dim": 128,
        "attention_bias": false, "use_sliding_window": false, "sliding_window": 4096,
        "max_window_layers": 28, "layer_types": null})"},
    {"qwen2_moe", R"({
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": false, "rope_theta": 10000.0, "head_dim": null, "qkv_bias": true,
        "use_sliding_window": false, "sliding_window": 4096, "max_window_layers": 28,
        "layer_types": null, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": false, "decoder_sparse_step": 1, "mlp_only_layers": null})"},
    {"qwen3_moe", R"({
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
        "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": false, "rope_theta": 10000.0, "head_dim": null,
        "attention_bias": false, "use_sliding_window": false, "sliding_window": 4096,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": false, "decoder_sparse_step": 1, "mlp_only_layers": null})"},
    {"glm4", R"({
        "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2,
        "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07,
        "tie_word_embeddings": false, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "head_dim": 128, "attention_bias": true})"},
    {"glm4_moe", R"({
        "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "tie_word_embeddings": false, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "head_dim": null, "attention_bias": false, "use_qk_norm": false, "n_routed_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
        "norm_topk_prob": true, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 1})"},
    {"glm4_moe_lite", R"({
        "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
        "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20,
        "hidden_act": "silu", "max_position_embeddings": 202752, "rms_norm_eps": 1e-05,
        "tie_word_embeddings": false, "rope_theta": 10000.0, "q_lora_rank": 768,
        "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "rope_interleave": true, "attention_bias": false, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1,
        "norm_topk_prob": true, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1,
        "mlp_layer_types": null, "num_nextn_predict_layers": 0})"},
    {"deepseek_v2", R"({
        "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": null,
        "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": false, "rope_theta": 10000.0, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "attention_bias": false, "n_routed_experts": 64, "num_experts_per_tok": null,
        "moe_intermediate_size": 1407, "n_shared_experts": 2, "norm_topk_prob": false,
        "routed_scaling_factor": 1.0, "n_group": null, "topk_group": null,
        "first_k_dense_replace": 0, "num_nextn_predict_layers": 0})"},
    {"deepseek_v3", R"({
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": false, "rope_theta": 10000.0, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rope_interleave": true, "attention_bias": false, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "norm_topk_prob": true, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
        "first_k_dense_replace": 3, "num_nextn_predict_layers": 1})"},
    {"gpt_oss", R"({
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
        "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "tie_word_embeddings": false, "rope_theta": 150000.0, "head_dim": 64,
        "attention_bias": true, "sliding_window": 128, "layer_types": null,
        "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096}})"},
};

}  // namespace

std::string_view TypeDefaults(std::string_view model_type) {
  for (const TypeRow& row : kTypeRows) {
    if (row.model_type == model_type) return row.json;
  }
  return {};
}

}  // namespace marlin
