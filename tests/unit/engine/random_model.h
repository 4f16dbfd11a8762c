// Small models with random weights, written for one test.
#pragma once

#include <string>
#include <vector>

#include "../checkpoint/test_files.h"

namespace marlin::testing {

/// A qwen2 of three layers, the last two with a sliding window (0: without): norms, biases, GQA,
/// and an untied head.
inline void WriteQwen2(const std::string& path, int64_t window) {
  constexpr int64_t kHidden = 64;
  constexpr int64_t kKv = 32;
  constexpr int64_t kWidth = 96;
  constexpr int64_t kVocab = 128;
  std::vector<TestTensor> tensors;
  const auto add = [&](const std::string& name, const Shape& shape) {
    tensors.push_back(RandomBf16(name, shape, static_cast<uint32_t>(tensors.size())));
  };
  add("model.embed_tokens.weight", {kVocab, kHidden});
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

/// Token ids without a simple repetition.
inline std::vector<int32_t> TokensBelow(int32_t vocab, size_t count) {
  std::vector<int32_t> tokens(count);
  for (size_t i = 0; i < count; ++i) {
    tokens[i] = static_cast<int32_t>((i * i * 31 + i * 17 + 5) % static_cast<size_t>(vocab));
  }
  return tokens;
}

}  // namespace marlin::testing
