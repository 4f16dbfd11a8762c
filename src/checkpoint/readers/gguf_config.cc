#include "checkpoint/readers/gguf_config.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <string>

#include "checkpoint/readers/gguf_generation.h"

namespace marlin {
namespace {

/// Builds the object; keys of the metadata are given without the architecture.
class ConfigBuilder {
 public:
  ConfigBuilder(const GgufArchitecture& architecture, const GgufMetadata& metadata,
                const GgufTensorFacts& tensors)
      : architecture_(architecture), metadata_(metadata), tensors_(tensors) {}

  Json Build() {
    const bool experts = HasGgufExperts(metadata_, architecture_.name);
    config_["model_type"] = ModelType(experts);
    AddDimensions();
    if (experts) AddExperts();
    if (architecture_.name == "deepseek2") AddLatentAttention();
    AddRotary();
    AddTokens();
    return std::move(config_);
  }

 private:
  std::string Key(std::string_view key) const {
    return fmt::format("{}.{}", architecture_.name, key);
  }
  std::optional<int64_t> Count(std::string_view key) const {
    const std::optional<int64_t> value = metadata_.Integer(Key(key));
    return value && *value >= 0 ? value : std::nullopt;
  }
  void Copy(std::string_view key, const char* name) { Put(name, Count(key)); }
  void Put(const char* name, std::optional<int64_t> value) {
    if (value) config_[name] = static_cast<uint64_t>(*value);
  }
  /// A number for each layer, or one for all: the largest, since some layers may have none.
  void CopyUniform(std::string_view key, const char* name) {
    const std::optional<std::vector<int64_t>> values = metadata_.Integers(Key(key));
    if (!values || values->empty()) return;
    const int64_t largest = *std::max_element(values->begin(), values->end());
    if (largest >= 0) Put(name, largest);
  }
  bool Has(std::string_view stem) const { return tensors_.find(stem) != nullptr; }

  std::string ModelType(bool experts) const {
    const std::optional<int64_t> gating = Count("expert_gating_func");
    constexpr int64_t kSigmoid = 2;
    if (architecture_.name == "deepseek2" && gating != kSigmoid) return "deepseek_v2";
    if (experts && !architecture_.expert_type.empty()) {
      return std::string(architecture_.expert_type);
    }
    // Mistral is llama with a sliding window.
    if (architecture_.name == "llama" && Count("attention.sliding_window")) return "mistral";
    return std::string(architecture_.model_type);
  }

  void AddDimensions() {
    Copy("embedding_length", "hidden_size");
    Copy("context_length", "max_position_embeddings");
    CopyUniform("feed_forward_length", "intermediate_size");
    CopyUniform("attention.head_count", "num_attention_heads");
    CopyUniform("attention.head_count_kv", "num_key_value_heads");
    if (const std::optional<int64_t> predicting = Count("nextn_predict_layers")) {
      const std::optional<int64_t> all = Count("block_count");
      if (all && *all >= *predicting) Put("num_hidden_layers", *all - *predicting);
      Put("num_nextn_predict_layers", predicting);
    } else {
      Copy("block_count", "num_hidden_layers");
    }
    const Shape* const embedding = tensors_.find("token_embd.weight");
    if (embedding != nullptr && embedding->rank() == 2) {
      Put("vocab_size", (*embedding)[0]);
    } else {
      Copy("vocab_size", "vocab_size");
    }
    if (const auto epsilon = metadata_.Real(Key("attention.layer_norm_rms_epsilon"))) {
      config_["rms_norm_eps"] = Shortest(*epsilon);
    }
    config_["tie_word_embeddings"] = !Has("output.weight");
    config_["attention_bias"] = Has("blk.0.attn_q.bias");
    if (architecture_.name == "qwen2moe") config_["qkv_bias"] = Has("blk.0.attn_q.bias");
    if (architecture_.name == "glm4moe") config_["use_qk_norm"] = Has("blk.0.attn_q_norm.weight");
    if (architecture_.name == "llama") config_["mlp_bias"] = Has("blk.0.ffn_up.bias");
    if (architecture_.name != "deepseek2") AddHeadSize();
    if (const auto window = Count("attention.sliding_window")) {
      Put("sliding_window", window);
      if (architecture_.name.starts_with("qwen")) config_["use_sliding_window"] = true;
    }
  }

  void AddHeadSize() {
    std::optional<int64_t> size = Count("attention.key_length");
    const std::optional<int64_t> hidden = Count("embedding_length");
    const std::optional<int64_t> heads = Count("attention.head_count");
    if (!size && hidden && heads && *heads > 0) size = *hidden / *heads;
    Put("head_dim", size);
    const std::optional<int64_t> rotated = Count("rope.dimension_count");
    if (size && *size > 0 && rotated && *rotated < *size) {
      config_["partial_rotary_factor"] = static_cast<double>(*rotated) / static_cast<double>(*size);
    }
  }

  void AddExperts() {
    const bool mixtral = architecture_.name == "llama" || architecture_.name == "gpt-oss";
    const bool deepseek = architecture_.name == "deepseek2" || architecture_.name == "glm4moe";
    Copy("expert_count",
         mixtral ? "num_local_experts" : (deepseek ? "n_routed_experts" : "num_experts"));
    Copy("expert_used_count", "num_experts_per_tok");
    Copy("expert_shared_count", "n_shared_experts");
    Copy("expert_shared_feed_forward_length", "shared_expert_intermediate_size");
    Copy("leading_dense_block_count", "first_k_dense_replace");
    Copy("expert_group_count", "n_group");
    Copy("expert_group_used_count", "topk_group");
    const std::optional<int64_t> width = Count("expert_feed_forward_length");
    Put(mixtral ? "intermediate_size" : "moe_intermediate_size", width);
    if (width && !config_.contains("intermediate_size")) Put("intermediate_size", width);
    if (const auto scale = metadata_.Real(Key("expert_weights_scale"))) {
      config_["routed_scaling_factor"] = Shortest(*scale);
    }
    // The runtime of these files normalizes for qwen3moe and does not for qwen2moe.
    const std::optional<bool> norm = metadata_.Bool(Key("expert_weights_norm"));
    config_["norm_topk_prob"] = norm.value_or(architecture_.name == "qwen3moe");
    if (architecture_.name.starts_with("qwen")) AddDenseLayers();
  }

  /// Layers with an MLP in place of experts.
  void AddDenseLayers() {
    Json dense = Json::array();
    const int64_t layers = std::min<int64_t>(Count("block_count").value_or(0), 1 << 12);
    for (int64_t layer = 0; layer < layers; ++layer) {
      if (Has(fmt::format("blk.{}.ffn_up.weight", layer))) {
        dense.push_back(static_cast<uint64_t>(layer));
      }
    }
    config_["mlp_only_layers"] = std::move(dense);
    config_["decoder_sparse_step"] = uint64_t{1};
  }

  void AddLatentAttention() {
    Copy("attention.q_lora_rank", "q_lora_rank");
    Copy("attention.kv_lora_rank", "kv_lora_rank");
    const std::optional<int64_t> rotated = Count("rope.dimension_count");
    // Newer files describe the compressed attention by the plain keys.
    std::optional<int64_t> key = Count("attention.key_length_mla");
    std::optional<int64_t> value = Count("attention.value_length_mla");
    if (!key) key = Count("attention.key_length");
    if (!value) value = Count("attention.value_length");
    Put("qk_rope_head_dim", rotated);
    if (key && rotated && *key >= *rotated) Put("qk_nope_head_dim", *key - *rotated);
    Put("v_head_dim", value);
    Put("num_key_value_heads", Count("attention.head_count"));
  }

  void AddRotary() {
    if (const auto theta = metadata_.Real(Key("rope.freq_base"))) {
      config_["rope_theta"] = Shortest(*theta);
    }
    const std::optional<std::string_view> type = metadata_.Text(Key("rope.scaling.type"));
    Json scaling = Json::object();
    if (!tensors_.rope_factors.empty()) {
      scaling = Llama3Scaling();
    } else if (type && *type != "none") {
      scaling["rope_type"] = std::string(*type);
      const auto real = [&](std::string_view key, const char* name) {
        if (const auto number = metadata_.Real(Key(key))) scaling[name] = Shortest(*number);
      };
      real("rope.scaling.factor", "factor");
      real("rope.scaling.yarn_beta_fast", "beta_fast");
      real("rope.scaling.yarn_beta_slow", "beta_slow");
      real("rope.scaling.attn_factor", "attention_factor");
      if (const auto context = Count("rope.scaling.original_context_length")) {
        scaling["original_max_position_embeddings"] = static_cast<uint64_t>(*context);
      }
      if (architecture_.name == "gpt-oss") scaling["truncate"] = false;
      // DeepSeek's converter stores a tenth of mscale_all_dim.
      if (const auto log = metadata_.Real(Key("rope.scaling.yarn_log_multiplier"))) {
        scaling["mscale"] = scaling["mscale_all_dim"] = Shortest(*log * 10);
      }
    }
    if (!scaling.empty()) config_["rope_scaling"] = std::move(scaling);
  }

  /// Llama 3.1 stores the quotients of its frequencies in a tensor, and not the four numbers that
  /// give them. They are taken from the quotients and checked against all of them.
  Json Llama3Scaling() const {
    const std::span<const float> factors = tensors_.rope_factors;
    const double factor = *std::max_element(factors.begin(), factors.end());
    if (factor == 1 && *std::min_element(factors.begin(), factors.end()) == 1)
      return Json::object();
    const double theta = metadata_.Real(Key("rope.freq_base")).value_or(10000);
    constexpr double kLow = 1;
    constexpr double kHigh = 4;
    constexpr double kContext = 8192;
    const auto pairs = static_cast<double>(factors.size());
    for (size_t i = 0; i < factors.size(); ++i) {
      const double frequency = std::pow(theta, -static_cast<double>(i) / pairs);
      const double turns = kContext * frequency / (2 * std::numbers::pi);
      const double smooth = std::clamp((turns - kLow) / (kHigh - kLow), 0.0, 1.0);
      const double expected = 1 / ((1 - smooth) / factor + smooth);
      if (!(std::abs(factors[i] - expected) <= 1e-3 * expected)) {
        return {{"rope_type", "rope_freqs.weight, whose factors are not those of llama3"}};
      }
    }
    return {{"rope_type", "llama3"},
            {"factor", Shortest(factor)},
            {"low_freq_factor", kLow},
            {"high_freq_factor", kHigh},
            {"original_max_position_embeddings", static_cast<uint64_t>(kContext)}};
  }

  void AddTokens() {
    const std::optional<int64_t> start = metadata_.Integer("tokenizer.ggml.bos_token_id");
    if (start && *start >= 0 && *start <= INT32_MAX) Put("bos_token_id", start);
    const std::vector<int64_t> ends = GgufEndTokens(metadata_);
    if (ends.size() == 1) {
      Put("eos_token_id", ends.front());
    } else if (!ends.empty()) {
      Json list = Json::array();
      for (const int64_t id : ends) list.push_back(static_cast<uint64_t>(id));
      config_["eos_token_id"] = std::move(list);
    }
  }

  const GgufArchitecture& architecture_;
  const GgufMetadata& metadata_;
  const GgufTensorFacts& tensors_;
  Json config_ = Json::object();
};

}  // namespace

bool HasGgufExperts(const GgufMetadata& metadata, std::string_view architecture) {
  return metadata.Integer(fmt::format("{}.expert_count", architecture)).value_or(0) > 0;
}

Json GgufConfig(const GgufArchitecture& architecture, const GgufMetadata& metadata,
                const GgufTensorFacts& tensors) {
  return ConfigBuilder(architecture, metadata, tensors).Build();
}

}  // namespace marlin
