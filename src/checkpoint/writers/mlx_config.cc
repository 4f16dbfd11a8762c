#include "checkpoint/writers/mlx_config.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "base/printable.h"
#include "recipe/text_config.h"
#include "recipe/typed_config.h"

namespace marlin {
namespace {

/// How a model of mlx_lm knows the RoPE of each kind of layers.
enum class MlxKinds : uint8_t {
  kNone,        ///< There is one for all.
  kLocalBase,   ///< rope_local_base_freq is the base of layers with a window.
  kParameters,  ///< As transformers 5 does.
};

/// A model of mlx_lm, and the keys of a config.json that it reads.
struct MlxType {
  std::string_view model_type;
  std::string_view experts = "";  ///< The key of their number.
  bool scales_rope = true;        ///< Knows other kinds of RoPE than the default one.
  bool biases = true;             ///< Follows attention_bias.
  MlxKinds kinds = MlxKinds::kNone;
  bool square = false;          ///< Heads are as wide together as the hidden states.
  std::string_view other = {};  ///< Words for a model that differs from the type; empty: none.
};
constexpr MlxType kMlxTypes[] = {
    {.model_type = "llama"},
    {.model_type = "mistral"},
    {.model_type = "mixtral", .experts = "num_local_experts", .scales_rope = false},
    {.model_type = "qwen2"},
    {.model_type = "qwen3", .biases = false},
    {.model_type = "qwen2_moe", .experts = "num_experts", .scales_rope = false},
    {.model_type = "qwen3_moe", .experts = "num_experts", .scales_rope = false, .biases = false},
    {.model_type = "glm4", .scales_rope = false},
    {.model_type = "glm4_moe", .experts = "n_routed_experts", .scales_rope = false},
    {.model_type = "glm4_moe_lite", .experts = "n_routed_experts"},
    {.model_type = "deepseek_v2", .experts = "n_routed_experts"},
    {.model_type = "deepseek_v3", .experts = "n_routed_experts"},
    {.model_type = "gpt_oss", .experts = "num_local_experts"},
    {.model_type = "gemma3_text", .biases = false, .kinds = MlxKinds::kLocalBase},
    {.model_type = "gemma4_text", .biases = false, .kinds = MlxKinds::kParameters},
    {.model_type = "phi3", .biases = false, .square = true},
    {.model_type = "seed_oss"},
    {.model_type = "smollm3"},
    {.model_type = "granite", .square = true},
    {.model_type = "olmo2"},
    {.model_type = "exaone4", .biases = false},
    {.model_type = "cohere2", .scales_rope = false, .square = true},
    {.model_type = "ernie4_5"},
    {.model_type = "helium", .scales_rope = false, .square = true},
    {.model_type = "hunyuan_v1_dense"},
    {.model_type = "minimax_m2", .experts = "num_local_experts", .scales_rope = false},
    {.model_type = "olmoe", .experts = "num_experts"},
    {.model_type = "ernie4_5_moe", .other = "leaves out the correction bias of the router"},
    {.model_type = "hunyuan_v1_moe", .other = "is not among its models"},
    {.model_type = "glm", .other = "rotates whole heads"},
    {.model_type = "dots1", .other = "has other names for stacks of experts"},
    {.model_type = "qwen3_next", .other = "has other forms of convolutions and norms"},
    {.model_type = "qwen3_5_text", .other = "is not among its models"},
    {.model_type = "qwen3_5_moe_text", .other = "is not among its models"},
};
constexpr const char* kFullAttention = "full_attention";
constexpr const char* kSlidingAttention = "sliding_attention";
constexpr std::string_view kGelu = "gelu_pytorch_tanh";
constexpr int64_t kGemmaInterval = 6;  ///< Layers up to a global one, by default.
constexpr std::array<std::string_view, 3> kExpertKeys = {"num_experts", "num_local_experts",
                                                         "n_routed_experts"};

/// A value that is there and not null.
const Json* Find(const Json& object, std::string_view key) {
  const auto found = object.find(std::string(key));
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

/// hidden_size over the heads; null without them.
Json HeadSize(const Json& config) {
  const Json* const hidden = Find(config, "hidden_size");
  const Json* const heads = Find(config, "num_attention_heads");
  if (hidden == nullptr || heads == nullptr || !hidden->is_number_unsigned() ||
      !heads->is_number_unsigned() || *heads == 0) {
    return {};
  }
  return hidden->get<uint64_t>() / heads->get<uint64_t>();
}

class MlxNames {
 public:
  explicit MlxNames(Json* config) : config_(*config) {}

  Status Take() {
    const Json* const type = Find(config_, "model_type");
    if (type == nullptr || !type->is_string()) return {};
    type_ = type->get<std::string>();
    if (IsMultimodalType(type_)) {
      return Status(Code::kUnsupported,
                    fmt::format("config.json: model_type: {}: mlx holds models of text alone",
                                Printable(type_)));
    }
    const auto* const known =
        std::find_if(std::begin(kMlxTypes), std::end(kMlxTypes),
                     [&](const MlxType& row) { return row.model_type == type_; });
    if (known == std::end(kMlxTypes)) return TakeRope(true);
    if (!known->other.empty()) return Refuse("model_type", known->other);
    MARLIN_RETURN_IF_ERROR(Complete());
    MARLIN_RETURN_IF_ERROR(TakeKinds(known->kinds));
    MARLIN_RETURN_IF_ERROR(TakeWindows());
    if (known->kinds != MlxKinds::kParameters) {
      MARLIN_RETURN_IF_ERROR(TakeRope(known->scales_rope));
    }
    TakeExperts(known->experts);
    return CheckFunction(*known);
  }

 private:
  bool IsTrue(std::string_view key) const {
    const Json* const value = Find(config_, key);
    return value != nullptr && value->is_boolean() && value->get<bool>();
  }
  bool IsFalse(std::string_view key) const {
    const Json* const value = Find(config_, key);
    return value != nullptr && value->is_boolean() && !value->get<bool>();
  }
  static std::string TextOf(const Json* value, std::string_view fallback) {
    return value != nullptr && value->is_string() ? value->get<std::string>()
                                                  : std::string(fallback);
  }
  Status Refuse(std::string_view key, std::string_view why) const {
    return Status(Code::kUnsupported,
                  fmt::format("config.json: {}: mlx_lm's {} {}", key, Printable(type_), why));
  }

  /// Keys that are missing get the defaults of the type: mlx_lm's models have others.
  Status Complete() {
    MARLIN_ASSIGN_OR_RETURN(
        const TypedConfig typed,
        ReadTypedConfig(ModelConfig::Of(config_, "config.json"), UnknownKeys::kIgnore));
    for (const auto& [key, value] : typed.config.values().items()) {
      if (!value.is_null() && !config_.contains(key)) config_[key] = value;
    }
    // Arguments without a default there.
    if (typed.config.Knows("head_dim") && Find(config_, "head_dim") == nullptr) {
      if (const Json size = HeadSize(config_); !size.is_null()) config_["head_dim"] = size;
    }
    if (type_ == "minimax_m2") {
      config_["shared_intermediate_size"] = uint64_t{0};
      if (Find(config_, "rotary_dim") == nullptr) config_["rotary_dim"] = config_["head_dim"];
    }
    return {};
  }

  /// RoPE parameters at the top level, as before transformers 5.
  Status TakeRope(bool scales) {
    const Json* parameters = Find(config_, "rope_parameters");
    if (parameters != nullptr && !parameters->is_object()) parameters = nullptr;
    Json own = parameters == nullptr ? Json::object() : *parameters;
    // Some types have parameters for each kind of layer.
    while (!own.empty() && own.begin()->is_object()) {
      const Json first = *own.begin();
      for (const Json& other : own) {
        if (other == first) continue;
        return Refuse("rope_parameters", "has the same RoPE in all layers");
      }
      own = first;
    }
    return TakeRopeOf(std::move(own), scales);
  }

  Status TakeRopeOf(Json own, bool scales = true) {
    for (const char* const key : {"rope_theta", "partial_rotary_factor"}) {
      if (Find(own, key) == nullptr) continue;
      config_[key] = own[key];
      own.erase(key);
    }
    if (const Json* const scaling = Find(config_, "rope_scaling");
        scaling != nullptr && scaling->is_object()) {
      own = *scaling;
    }
    const std::string kind = TextOf(Find(own, "rope_type"), TextOf(Find(own, "type"), "default"));
    config_["rope_scaling"] = nullptr;
    if (kind == "default") return {};
    if (!scales) return Refuse("rope_scaling", "knows no scaling of RoPE");
    if (kind == "yarn" && Find(own, "attention_factor") != nullptr) {
      return Refuse("rope_scaling.attention_factor", "computes it from the factor");
    }
    if (kind == "yarn" && Find(own, "truncate") != nullptr && own["truncate"] == false) {
      return Refuse("rope_scaling.truncate", "rounds the bounds of yarn");
    }
    own["type"] = own["rope_type"] = kind;
    config_["rope_scaling"] = std::move(own);
    return {};
  }

  Status TakeKinds(MlxKinds kinds) {
    if (kinds == MlxKinds::kNone) return {};
    if (TextOf(Find(config_, "hidden_activation"), kGelu) != kGelu) {
      return Refuse("hidden_activation", "computes gelu_pytorch_tanh");
    }
    return kinds == MlxKinds::kLocalBase ? TakeLocalBase() : TakeGlobalHeads();
  }

  /// The names of the layers' kinds, one per layer.
  std::vector<std::string> LayerKinds(int64_t interval) const {
    std::vector<std::string> kinds;
    if (const Json* const types = Find(config_, "layer_types"); types != nullptr) {
      for (const Json& type : *types) kinds.push_back(TextOf(&type, ""));
      return kinds;
    }
    const Json* const layers = Find(config_, "num_hidden_layers");
    const int64_t count = layers == nullptr ? 0 : layers->get<int64_t>();
    for (int64_t i = 1; i <= count; ++i) {
      kinds.emplace_back(i % interval == 0 ? kFullAttention : kSlidingAttention);
    }
    return kinds;
  }

  /// gemma3: every sliding_window_pattern-th layer is global, and the others' RoPE has a base
  /// alone.
  Status TakeLocalBase() {
    if (Find(config_, "final_logit_softcapping") != nullptr) {
      return Refuse("final_logit_softcapping", "does not cap logits");
    }
    const Json* const pattern = Find(config_, "sliding_window_pattern");
    const std::vector<std::string> kinds =
        LayerKinds(pattern == nullptr ? kGemmaInterval : pattern->get<int64_t>());
    const auto first = std::find(kinds.begin(), kinds.end(), kFullAttention);
    const auto interval = first - kinds.begin() + 1;
    for (size_t i = 0; i < kinds.size(); ++i) {
      const bool global = (static_cast<int64_t>(i) + 1) % interval == 0;
      if (first == kinds.end() || (kinds[i] == kFullAttention) != global) {
        return Refuse("layer_types", "has a global layer after every few with a window");
      }
    }
    config_["sliding_window_pattern"] = static_cast<uint64_t>(interval);
    const Json* const parameters = Find(config_, "rope_parameters");
    if (parameters == nullptr || !parameters->contains(kFullAttention)) return {};
    const Json full = (*parameters)[kFullAttention];
    const Json sliding = parameters->value(kSlidingAttention, Json::object());
    if (TextOf(Find(sliding, "rope_type"), "default") != "default") {
      return Refuse("rope_parameters.sliding_attention", "scales the RoPE of global layers alone");
    }
    if (const Json* const base = Find(sliding, "rope_theta"); base != nullptr) {
      config_["rope_local_base_freq"] = *base;
    }
    MARLIN_RETURN_IF_ERROR(TakeRopeOf(full));
    config_.erase("rope_parameters");
    return {};
  }

  /// gemma4: the heads of global layers, which transformers 5 lists by layer.
  Status TakeGlobalHeads() {
    const Json* const parameters = Find(config_, "rope_parameters");
    for (const Json& own : parameters == nullptr ? Json::object() : *parameters) {
      const std::string type = TextOf(Find(own, "rope_type"), "default");
      if (type == "default" || type == "proportional") continue;
      return Refuse("rope_parameters", "knows no scaling of RoPE");
    }
    std::vector<std::string> kinds = LayerKinds(kGemmaInterval);
    if (!kinds.empty()) kinds.back() = kFullAttention;
    if (const Json* const layers = Find(config_, "per_layer_config"); layers != nullptr) {
      for (const auto& [layer, own] : layers->items()) {
        const auto at = static_cast<size_t>(std::strtoul(layer.c_str(), nullptr, 10));
        if (at >= kinds.size() || kinds[at] != kFullAttention) {
          return Refuse("per_layer_config", "has other heads in global layers alone");
        }
        if (own.contains("head_dim")) config_["global_head_dim"] = own["head_dim"];
        if (!own.contains("num_key_value_heads")) continue;
        config_["num_global_key_value_heads"] = own["num_key_value_heads"];
      }
    }
    config_["layer_types"] = kinds;
    if (!config_.contains("final_logit_softcapping")) config_["final_logit_softcapping"] = nullptr;
    return {};
  }

  void TakeExperts(std::string_view name) {
    if (name.empty()) return;
    for (const std::string_view key : kExpertKeys) {
      const Json* const count = Find(config_, key);
      if (count == nullptr) continue;
      const Json value = *count;
      config_[std::string(name)] = value;
      return;
    }
  }

  Status CheckFunction(const MlxType& known) {
    const std::string activation = TextOf(Find(config_, "hidden_act"), "silu");
    if (type_ != "gpt_oss" && activation != "silu" && activation != "swish") {
      return Refuse("hidden_act", "computes silu");
    }
    if (!known.biases && IsTrue("attention_bias")) {
      return Refuse("attention_bias", "has no biases in attention");
    }
    if (IsTrue("use_sliding_window")) return Refuse("use_sliding_window", "has no windows");
    if ((type_ == "mixtral" || type_ == "mistral" || type_ == "phi3") &&
        LimitsAttention("sliding_window")) {
      return Refuse("sliding_window", "has no windows in all layers");
    }
    const Json* const size = Find(config_, "head_dim");
    if (known.square && size != nullptr && *size != HeadSize(config_)) {
      return Refuse("head_dim", "has heads as wide together as hidden_size");
    }
    if (type_ == "cohere2" && !IsTrue("tie_word_embeddings")) {
      return Refuse("tie_word_embeddings", "has no matrix of its own for the head");
    }
    if (type_ == "qwen2_moe") MARLIN_RETURN_IF_ERROR(CheckQwen2Moe());
    if (IsFalse("rope_interleave")) return Refuse("rope_interleave", "interleaves RoPE");
    return TakeMlpTypes();
  }

  /// The layers with windows, in the form of mlx_lm's models: exaone4 takes a letter for each
  /// layer, others a number, of which each multiple is a layer without a window.
  Status TakeWindows() {
    const Json* const types = Find(config_, "layer_types");
    if (type_ != "exaone4" && type_ != "cohere2") return {};
    if (type_ == "exaone4" && Find(config_, "sliding_window") == nullptr) {
      config_["sliding_window"] = config_["sliding_window_pattern"] = nullptr;
      return {};
    }
    const Json* const number = Find(config_, "sliding_window_pattern");
    if (number == nullptr) config_["sliding_window_pattern"] = uint64_t{4};
    if (types == nullptr || !types->is_array()) return {};
    std::string letters;
    for (const Json& kind : *types) letters += kind == "sliding_attention" ? 'L' : 'G';
    if (type_ == "exaone4") {
      if (letters.find('L') == std::string::npos || letters.find('G') == std::string::npos) {
        return Refuse("layer_types", "has layers of both kinds if it has a window");
      }
      config_["sliding_window_pattern"] = letters;
      return {};
    }
    const size_t first = letters.find('G');
    const size_t interval = first == std::string::npos ? letters.size() + 1 : first + 1;
    for (size_t i = 0; i < letters.size(); ++i) {
      if ((letters[i] == 'G') != ((i + 1) % interval == 0)) {
        return Refuse("layer_types", "has windows in all but each of some number of layers");
      }
    }
    config_["sliding_window_pattern"] = static_cast<uint64_t>(interval);
    return {};
  }

  /// Whether a window is shorter than the context.
  bool LimitsAttention(std::string_view key) const {
    const Json* const window = Find(config_, key);
    const Json* const context = Find(config_, "max_position_embeddings");
    return window != nullptr && (context == nullptr || !window->is_number() ||
                                 !context->is_number() || *window < *context);
  }

  Status CheckQwen2Moe() const {
    if (IsTrue("norm_topk_prob")) return Refuse("norm_topk_prob", "does not normalize weights");
    if (IsFalse("qkv_bias")) return Refuse("qkv_bias", "has biases in attention");
    const Json* const step = Find(config_, "decoder_sparse_step");
    if (step != nullptr && *step != 1) {
      return Refuse("decoder_sparse_step", "has experts in all layers");
    }
    const Json* const dense = Find(config_, "mlp_only_layers");
    if (dense != nullptr && !dense->empty()) {
      return Refuse("mlp_only_layers", "has experts in all layers");
    }
    return {};
  }

  /// The list of transformers' glm4_moe_lite as the number of leading layers without experts.
  Status TakeMlpTypes() {
    const Json* const types = Find(config_, "mlp_layer_types");
    if (types == nullptr || !types->is_array()) return {};
    const auto is_dense = [](const Json& kind) { return kind == "dense"; };
    const auto first = std::find_if_not(types->begin(), types->end(), is_dense);
    if (std::any_of(first, types->end(), is_dense)) {
      return Refuse("mlp_layer_types", "has layers without experts only in front");
    }
    const auto count = static_cast<uint64_t>(first - types->begin());
    config_["first_k_dense_replace"] = count;
    return {};
  }

  Json& config_;
  std::string type_;
};

}  // namespace

Status TakeMlxNames(Json* config) { return MlxNames(config).Take(); }

}  // namespace marlin
