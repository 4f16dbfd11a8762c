#include "checkpoint/readers/gguf/gguf_config.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "checkpoint/readers/gguf/gguf_generation.h"
#include "checkpoint/readers/gguf/gguf_keys.h"
#include "checkpoint/readers/gguf/gguf_rope.h"
#include "recipe/decoder_shape.h"
#include "recipe/name_list.h"
#include "recipe/typed_config.h"

namespace marlin {
namespace {

constexpr double kTheta = 10000;

/// Keys after the architecture that are read here, or that the tensors' shapes repeat, beyond
/// gguf_keys.h and kGgufRopeKeys.
constexpr std::string_view kOtherKeys[] = {
    "attention.causal",
    "attention.key_length",
    "attention.key_length_mla",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "attention.value_length_mla",
    "block_count",
    "expert_count",
    "expert_gating_func",
    "expert_weights_norm",
    "expert_weights_scale",
    "n_deepstack_layers",  // Layers that take features of images.
    "nextn_predict_layers",
    "tensor_data_layout",
    kGgufKvHeads.gguf,
};

/// Whether a key after the architecture is understood.
bool IsRead(std::string_view key) {
  const auto has = [key](std::span<const GgufCount> counts) {
    return std::any_of(counts.begin(), counts.end(),
                       [key](const GgufCount& count) { return count.gguf == key; });
  };
  return has(kGgufCounts) || has(kGgufExpertCounts) || has(kGgufLatentCounts) || has(kGgufReals) ||
         Contains(kOtherKeys, key) || Contains(kGgufRopeKeys, key);
}

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
    config_["rope_theta"] = Shortest(metadata_.Real(Key("rope.freq_base")).value_or(kTheta));
    const GgufRope rope(architecture_, metadata_, tensors_.rope_factors);
    if (Json scaling = rope.Scaling(); !scaling.empty()) {
      config_["rope_scaling"] = std::move(scaling);
    }
    AddTokens();
    AddOthers();
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
  void Copy(std::span<const GgufCount> counts) {
    for (const GgufCount& count : counts) Copy(count);
  }
  void Copy(const GgufCount& count) {
    count.by_layer ? CopyUniform(count.gguf, count.config) : Put(count.config, Count(count.gguf));
  }
  bool IsReadBy(std::string_view name) const {
    const Result<Json> defaults =
        ParseJsonObject(TypeDefaults(config_["model_type"].get<std::string>()), "defaults");
    return defaults.ok() && defaults->contains(std::string(name));
  }
  /// Puts a value that the type reads.
  void PutIfRead(std::string_view name, const Json& value) {
    if (IsReadBy(name)) config_[std::string(name)] = value;
  }
  void Put(std::string_view name, std::optional<int64_t> value) {
    if (value) config_[std::string(name)] = static_cast<uint64_t>(*value);
  }
  /// A number for each layer, or one for all: the largest, since some layers may have none.
  void CopyUniform(std::string_view key, std::string_view name) {
    const std::optional<std::vector<int64_t>> values = metadata_.Integers(Key(key));
    if (!values || values->empty()) return;
    const int64_t largest = *std::max_element(values->begin(), values->end());
    if (largest >= 0) Put(name, largest);
  }
  bool Has(std::string_view stem) const { return tensors_.find(stem) != nullptr; }

  std::string ModelType(bool experts) const {
    const std::optional<int64_t> gating = Count("expert_gating_func");
    if (architecture_.name == "deepseek2" && gating != kGgufSigmoid) return "deepseek_v2";
    if (experts && !architecture_.expert_type.empty()) {
      return std::string(architecture_.expert_type);
    }
    if (architecture_.name == "olmo2" && Count("attention.sliding_window")) return "olmo3";
    // Mistral is llama with a sliding window.
    if (architecture_.name == "llama" && Count("attention.sliding_window")) return "mistral";
    return std::string(architecture_.model_type);
  }

  void AddDimensions() {
    Copy(kGgufCounts);
    Copy(kGgufKvHeads);
    if (const std::optional<int64_t> predicting = Count("nextn_predict_layers")) {
      const std::optional<int64_t> all = Count("block_count");
      if (all && *all >= *predicting) Put("num_hidden_layers", *all - *predicting);
      Put("num_nextn_predict_layers", predicting);
    } else {
      Put("num_hidden_layers", Count("block_count"));
    }
    const Shape* const embedding = tensors_.find("token_embd.weight");
    if (embedding != nullptr && embedding->rank() == 2) {
      Put("vocab_size", (*embedding)[0]);
    }
    if (const auto epsilon = metadata_.Real(Key("attention.layer_norm_rms_epsilon"))) {
      config_["rms_norm_eps"] = Shortest(*epsilon);
    }
    config_["tie_word_embeddings"] = !Has("output.weight");
    config_["attention_bias"] = Has("blk.0.attn_q.bias");
    if (architecture_.name == "qwen2moe") config_["qkv_bias"] = Has("blk.0.attn_q.bias");
    if (architecture_.name == "glm4moe") config_["use_qk_norm"] = Has("blk.0.attn_q_norm.weight");
    PutIfRead("mlp_bias", Has("blk.0.ffn_up.bias"));
    PutIfRead("attention_out_bias", Has("blk.0.attn_output.bias"));
    for (const GgufCount& key : kGgufReals) {
      if (const auto value = metadata_.Real(Key(key.gguf))) PutIfRead(key.config, Shortest(*value));
    }
    if (architecture_.name != "deepseek2") AddHeadSize();
    // The runtime of these files knows no windows of Qwen's layers.
    if (!architecture_.name.starts_with("qwen") && Count("attention.sliding_window") != 0) {
      Put("sliding_window", Count("attention.sliding_window"));
    }
    if (const auto context = Count("rope.scaling.original_context_length");
        context && IsReadBy("original_max_position_embeddings")) {
      Put("original_max_position_embeddings", context);
    }
  }

  void AddHeadSize() {
    std::optional<int64_t> size = Count("attention.key_length");
    const std::optional<int64_t> hidden = Count("embedding_length");
    const std::optional<int64_t> heads = Count("attention.head_count");
    if (!size && hidden && heads && *heads > 0) size = *hidden / *heads;
    Put("head_dim", size);
    const std::optional<int64_t> rotated = Count("rope.dimension_count");
    const bool whole = !size || *size == 0 || !rotated || *rotated >= *size;
    config_["partial_rotary_factor"] =
        whole ? 1.0 : static_cast<double>(*rotated) / static_cast<double>(*size);
  }

  void AddExperts() {
    const bool mixtral = architecture_.name == "llama" || architecture_.name == "gpt-oss";
    const bool deepseek = architecture_.name == "deepseek2" || architecture_.name == "glm4moe";
    Put(mixtral ? "num_local_experts" : (deepseek ? "n_routed_experts" : "num_experts"),
        Count("expert_count"));
    const std::optional<int64_t> width = Count(kGgufExpertWidth);
    const bool groups = Count(kGgufExpertGroups).value_or(0) > 0;
    PutIfRead("topk_method", groups ? "group_limited_greedy" : "greedy");
    for (const GgufCount& count : kGgufExpertCounts) {
      const bool renamed = mixtral && count.gguf == kGgufExpertWidth;
      if (!renamed && (groups || !count.config.ends_with("_group"))) Copy(count);
    }
    if (mixtral) Put("intermediate_size", width);
    if (width && !config_.contains("intermediate_size")) Put("intermediate_size", width);
    const double scale = metadata_.Real(Key("expert_weights_scale")).value_or(0);
    config_["routed_scaling_factor"] = scale == 0 ? 1.0 : Shortest(scale);
    // The runtime of these files normalizes for qwen3moe and does not for qwen2moe. Mixtral and
    // gpt-oss have no choice.
    const std::optional<bool> norm = metadata_.Bool(Key("expert_weights_norm"));
    if (!mixtral) config_["norm_topk_prob"] = norm.value_or(architecture_.name == "qwen3moe");
    const int64_t gating = Count("expert_gating_func").value_or(0);
    if (architecture_.name == "glm4moe" && gating != 0 && gating != kGgufSigmoid) {
      config_["scoring_func"] = fmt::format("expert_gating_func {}", gating);
    }
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
    Copy(kGgufLatentCounts);
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

  /// Drops what the type does not read. Values that the file lacks are its runtime's, never
  /// the type's elsewhere: null for what the runtime requires, too, so that running the
  /// model names it. Keys that are not understood are kept, so that running the model refuses those
  /// that change results.
  void AddOthers() {
    const std::string type = config_["model_type"];
    for (auto at = config_.begin(); at != config_.end();) {
      const std::string_view treatment = KeyTreatment(type, at.key());
      const bool other = treatment == "suspect" || treatment == "ignored";
      at = other ? config_.erase(at) : std::next(at);
    }
    const Result<Json> defaults = ParseJsonObject(TypeDefaults(type), "defaults");
    if (!defaults.ok()) return;
    const Json own = {
        {"hidden_act", "silu"},
        {"num_key_value_heads", config_.value("num_attention_heads", Json())},
        {"max_window_layers", 0},
        {"original_max_position_embeddings", config_.value("max_position_embeddings", Json())},
        {"rope_interleave", true},
        {"rope_parameters", Json::object()},
        {"swiglu_limit", 7.0},
        {"swiglu_alpha", 1.702},
        {"first_k_dense_replace", 0},
        {"n_shared_experts", 0},
        {"embedding_multiplier", 1.0},
        {"residual_multiplier", 1.0},
        {"logits_scaling", 1.0},
        {"no_rope_layer_interval", 4},
        {"n_group", 1},
        {"topk_group", 1},
        {"num_nextn_predict_layers", 0}};
    for (const auto& [key, value] : defaults->items()) {
      if (config_.contains(key)) continue;
      config_[key] = own.contains(key) ? own[key] : (value.is_boolean() ? Json(false) : Json());
    }
    if (metadata_.Bool(Key("attention.causal")) == false) config_["is_causal"] = false;
    for (const std::string_view key : metadata_.Keys(Key(""))) {
      const std::string_view name = key.substr(architecture_.name.size() + 1);
      if (!IsRead(name)) config_[std::string(key)] = ValueOf(key);
    }
  }
  Json ValueOf(std::string_view key) const {
    if (const auto flag = metadata_.Bool(key)) return *flag;
    if (const auto text = metadata_.Text(key)) return std::string(*text);
    if (const auto integer = metadata_.Integer(key)) return *integer;
    if (const auto real = metadata_.Real(key)) return Shortest(*real);
    return "an array";
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
