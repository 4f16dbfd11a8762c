// Counts of config.json and their keys in a GGUF file, for reading and for writing.
#pragma once

#include <cstdint>
#include <string_view>

namespace marlin {

struct GgufCount {
  std::string_view config;
  std::string_view gguf;  ///< After the architecture.
  bool by_layer = false;  ///< A file may have a number for each layer.
};

inline constexpr GgufCount kGgufCounts[] = {
    {"max_position_embeddings", "context_length"},
    {"hidden_size", "embedding_length"},
    {"intermediate_size", "feed_forward_length", true},
    {"num_attention_heads", "attention.head_count", true},
    {"vocab_size", "vocab_size"},
};
inline constexpr GgufCount kGgufKvHeads = {"num_key_value_heads", "attention.head_count_kv", true};

/// Numbers that are no counts, where a type has them.
inline constexpr GgufCount kGgufReals[] = {
    {"embedding_multiplier", "embedding_scale"},
    {"residual_multiplier", "residual_scale"},
    {"logits_scaling", "logit_scale"},
    {"logit_scale", "logit_scale"},
    {"attention_multiplier", "attention.scale"},
    {"attn_logit_softcapping", "attn_logit_softcapping"},
    {"final_logit_softcapping", "final_logit_softcapping"},
};

inline constexpr std::string_view kGgufExpertWidth = "expert_feed_forward_length";
inline constexpr std::string_view kGgufExpertGroups = "expert_group_count";  ///< 0: none.
inline constexpr GgufCount kGgufExpertCounts[] = {
    {"num_experts_per_tok", "expert_used_count"},
    {"moe_intermediate_size", kGgufExpertWidth},
    {"shared_expert_intermediate_size", "expert_shared_feed_forward_length"},
    {"n_shared_experts", "expert_shared_count"},
    {"first_k_dense_replace", "leading_dense_block_count"},
    {"n_group", kGgufExpertGroups},
    {"topk_group", "expert_group_used_count"},
    {"moe_layer_start_index", "leading_dense_block_count"},
    {"moe_layer_interval", "interleave_moe_layer_step"},
};

inline constexpr GgufCount kGgufLatentCounts[] = {
    {"q_lora_rank", "attention.q_lora_rank"},
    {"kv_lora_rank", "attention.kv_lora_rank"},
};

/// Gated delta nets.
inline constexpr GgufCount kGgufDeltaCounts[] = {
    {"linear_conv_kernel_dim", "ssm.conv_kernel"},
    {"linear_key_head_dim", "ssm.state_size"},
    {"linear_num_key_heads", "ssm.group_count"},
    {"linear_num_value_heads", "ssm.time_step_rank"},
};
inline constexpr std::string_view kGgufDeltaInner =
    "ssm.inner_size";  ///< All value heads together.
inline constexpr std::string_view kGgufInterval = "full_attention_interval";
inline constexpr std::string_view kGgufRecurrentLayers = "attention.recurrent_layers";

inline constexpr std::string_view kGgufWindow = "attention.sliding_window";
inline constexpr std::string_view kGgufWindowPattern = "attention.sliding_window_pattern";
inline constexpr std::string_view kGgufNormEpsilon = "attention.layer_norm_epsilon";
/// The base of RoPE in layers with a window, where it is another one.
inline constexpr std::string_view kGgufWindowBase = "rope.freq_base_swa";
/// Layers up to a global one in models of gemma3.
inline constexpr int64_t kGgufGemmaInterval = 6;

/// The number whose root divides the scores of Gemma's queries and keys: the runtime of these files
/// knows the largest models by their layers.
constexpr int64_t GgufGemmaScalar(int64_t layers, int64_t head_dim, int64_t hidden, int64_t heads) {
  return layers == 46 || layers == 62 ? hidden / (heads > 0 ? heads : 1) : head_dim;
}

/// The layers of models of exaone4 that have windows: of no others.
inline constexpr int64_t kGgufWindowedExaone = 64;

/// Values of expert_gating_func.
inline constexpr int64_t kGgufSoftmax = 1;
inline constexpr int64_t kGgufSigmoid = 2;
inline constexpr int64_t kGgufSoftmaxOfChosen = 3;

}  // namespace marlin
