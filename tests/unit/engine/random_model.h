// Small models with random weights, written for one test.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../checkpoint/test_files.h"
#include "base/json.h"
#include "base/scalars.h"
#include "recipe/architecture.h"

namespace marlin::testing {

/// A qwen2 of three layers, the last two with a sliding window (0: without): norms, biases, GQA,
/// and an untied head. `nan_token`, unless negative, has an embedding of NaN.
inline void WriteQwen2(const std::string& path, int64_t window, int32_t nan_token = -1) {
  constexpr int64_t kHidden = 64;
  constexpr int64_t kKv = 32;
  constexpr int64_t kWidth = 96;
  constexpr int64_t kVocab = 128;
  std::vector<TestTensor> tensors;
  const auto add = [&](const std::string& name, const Shape& shape) {
    tensors.push_back(RandomBf16(name, shape, static_cast<uint32_t>(tensors.size())));
  };
  add("model.embed_tokens.weight", {kVocab, kHidden});
  if (nan_token >= 0) {
    const uint16_t nan = FloatToBf16(std::numeric_limits<float>::quiet_NaN());
    std::memcpy(tensors.back().data.data() + nan_token * kHidden * 2, &nan, sizeof(nan));
  }
  add("lm_head.weight", {kVocab, kHidden});
  add("model.norm.weight", {kHidden});
  for (int layer = 0; layer < 3; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    add(prefix + "input_layernorm.weight", {kHidden});
    add(prefix + "post_attention_layernorm.weight", {kHidden});
    for (const auto& [name, out] :
         {std::pair<std::string, int64_t>{"q_proj", kHidden}, {"k_proj", kKv}, {"v_proj", kKv}}) {
      add(prefix + "self_attn." + name + ".weight", {out, kHidden});
      add(prefix + "self_attn." + name + ".bias", {out});
    }
    add(prefix + "self_attn.o_proj.weight", {kHidden, kHidden});
    add(prefix + "mlp.gate_proj.weight", {kWidth, kHidden});
    add(prefix + "mlp.up_proj.weight", {kWidth, kHidden});
    add(prefix + "mlp.down_proj.weight", {kHidden, kWidth});
  }
  WriteFile(path + "/model.safetensors", BuildSafetensors(tensors));
  WriteFile(path + "/config.json",
            R"({"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
  "model_type": "qwen2", "max_position_embeddings": 4096, "tie_word_embeddings": false,
  "rms_norm_eps": 1e-6, "max_window_layers": 1, "hidden_size": )" +
                std::to_string(kHidden) + ", \"intermediate_size\": " + std::to_string(kWidth) +
                ", \"vocab_size\": " + std::to_string(kVocab) +
                ", \"use_sliding_window\": " + (window > 0 ? "true" : "false") +
                ", \"sliding_window\": " + std::to_string(window > 0 ? window : 1) + "}");
}

/// Writes a config and its tensors.
inline void WriteRandom(const std::string& path, const Json& config) {
  const auto model = DescribeModel(config.dump());
  ASSERT_TRUE(model.ok()) << model.status().message();
  std::vector<TestTensor> tensors;
  uint32_t seed = 1;
  for (const ModelTensor& tensor : model->tensors) {
    tensors.push_back(RandomBf16(tensor.name, tensor.shape, seed++));
  }
  WriteFile(path + "/config.json", config.dump());
  WriteFile(path + "/model.safetensors", BuildSafetensors(tensors));
}

/// A deepseek_v3 of two dense layers, whose latent attention expands latents in prefill. Dense:
/// a rounding error in front of a router can select another expert.
inline void WriteDeepseekV3(const std::string& path, int64_t vocab, int64_t positions) {
  const Json config = {{"model_type", "deepseek_v3"},
                       {"hidden_size", 64},
                       {"intermediate_size", 96},
                       {"num_hidden_layers", 2},
                       {"vocab_size", vocab},
                       {"num_attention_heads", 4},
                       {"moe_intermediate_size", 32},
                       {"num_experts_per_tok", 2},
                       {"kv_lora_rank", 256},
                       {"qk_nope_head_dim", 64},
                       {"qk_rope_head_dim", 16},
                       {"v_head_dim", 64},
                       {"max_position_embeddings", positions},
                       {"n_routed_experts", 4},
                       {"n_shared_experts", 1},
                       {"first_k_dense_replace", 2},
                       {"q_lora_rank", nullptr},
                       {"n_group", 1},
                       {"topk_group", 1}};
  WriteRandom(path, config);
}

/// A qwen3_next of four layers with experts, of which the last one attends to keys and values and
/// the others are gated delta nets.
inline void WriteQwen3Next(const std::string& path, int64_t vocab) {
  WriteRandom(path, {{"model_type", "qwen3_next"},
                     {"hidden_size", 64},
                     {"intermediate_size", 96},
                     {"num_hidden_layers", 4},
                     {"vocab_size", vocab},
                     {"num_attention_heads", 4},
                     {"num_key_value_heads", 2},
                     {"head_dim", 32},
                     {"max_position_embeddings", 8192},
                     {"linear_key_head_dim", 16},
                     {"linear_value_head_dim", 24},
                     {"linear_num_key_heads", 2},
                     {"linear_num_value_heads", 4},
                     {"num_experts", 4},
                     {"num_experts_per_tok", 2},
                     {"moe_intermediate_size", 32},
                     {"shared_expert_intermediate_size", 32}});
}

/// A granitemoehybrid of three layers with experts, of which the second one attends to keys and
/// values and the others are Mamba-2 mixers.
inline void WriteGraniteHybrid(const std::string& path, int64_t vocab) {
  WriteRandom(path, {{"model_type", "granitemoehybrid"},
                     {"hidden_size", 64},
                     {"intermediate_size", 32},
                     {"shared_intermediate_size", 48},
                     {"num_hidden_layers", 3},
                     {"vocab_size", vocab},
                     {"num_attention_heads", 4},
                     {"num_key_value_heads", 2},
                     {"max_position_embeddings", 8192},
                     {"layer_types", {"mamba", "attention", "mamba"}},
                     {"mamba_n_heads", 8},
                     {"mamba_n_groups", 2},
                     {"mamba_d_state", 24},
                     {"num_local_experts", 4}});
}

/// An lfm2 of three layers, of which the second one attends to keys and values and the others are
/// short convolutions.
inline void WriteLfm2(const std::string& path, int64_t vocab) {
  WriteRandom(path, {{"model_type", "lfm2"},
                     {"hidden_size", 64},
                     {"intermediate_size", 96},
                     {"block_auto_adjust_ff_dim", false},
                     {"num_hidden_layers", 3},
                     {"vocab_size", vocab},
                     {"num_attention_heads", 4},
                     {"num_key_value_heads", 2},
                     {"max_position_embeddings", 8192},
                     {"tie_word_embeddings", false},
                     {"full_attn_idxs", {1}}});
}

/// A nemotron_h whose layers are a Mamba-2 mixer, experts, attention, another mixer and an MLP.
inline void WriteNemotron(const std::string& path, int64_t vocab) {
  WriteRandom(path, {{"model_type", "nemotron_h"},
                     {"hidden_size", 64},
                     {"intermediate_size", 96},
                     {"hybrid_override_pattern", "ME*M-"},
                     {"vocab_size", vocab},
                     {"num_attention_heads", 4},
                     {"num_key_value_heads", 2},
                     {"head_dim", 16},
                     {"max_position_embeddings", 8192},
                     {"mamba_num_heads", 4},
                     {"mamba_head_dim", 24},
                     {"n_groups", 2},
                     {"ssm_state_size", 16},
                     {"n_routed_experts", 4},
                     {"moe_intermediate_size", 32},
                     {"moe_shared_expert_intermediate_size", 48}});
}

/// One of these models with a recurrent state, by its type.
inline void WriteRecurrent(const std::string& type, const std::string& path, int64_t vocab) {
  if (type == "qwen3_next") WriteQwen3Next(path, vocab);
  if (type == "granitemoehybrid") WriteGraniteHybrid(path, vocab);
  if (type == "lfm2") WriteLfm2(path, vocab);
  if (type == "nemotron_h") WriteNemotron(path, vocab);
}

/// Token ids without a simple repetition.
inline std::vector<int32_t> TokensBelow(int32_t vocab, size_t count) {
  std::vector<int32_t> tokens(count);
  for (size_t i = 0; i < count; ++i) {
    tokens[i] = static_cast<int32_t>((i * i * 31 + i * 17 + 5) % static_cast<size_t>(vocab));
  }
  return tokens;
}

}  // namespace marlin::testing
