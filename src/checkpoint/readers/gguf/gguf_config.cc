#include "checkpoint/readers/gguf/gguf_config.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>

#include "checkpoint/readers/gguf/gguf_config_draft.h"
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
    kGgufWindow,
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
    kGgufWindowBase,
};

constexpr std::string_view kDeltaKeys[] = {kGgufDeltaInner, kGgufInterval, kGgufRecurrentLayers};

/// Whether a key after the architecture is understood in files of a type.
bool IsUnderstood(const GgufConfigDraft& draft, std::string_view key) {
  const auto has = [key](std::span<const GgufCount> counts) {
    return std::any_of(counts.begin(), counts.end(),
                       [key](const GgufCount& count) { return count.gguf == key; });
  };
  if (key == kGgufWindowPattern && draft.IsRead("sliding_window_pattern")) return true;
  if (key == kGgufNormEpsilon && draft.IsRead("layer_norm_eps")) return true;
  if (draft.IsRead("linear_num_key_heads") &&
      (has(kGgufDeltaCounts) || Contains(kDeltaKeys, key))) {
    return true;
  }
  return has(kGgufCounts) || has(kGgufExpertCounts) || has(kGgufLatentCounts) || has(kGgufReals) ||
         Contains(kOtherKeys, key) || Contains(kGgufRopeKeys, key);
}

std::string ModelType(const GgufNaming& naming, const GgufMetadata& metadata) {
  const std::string_view name = naming.architecture->name;
  const auto integer = [&](std::string_view key) {
    return metadata.Integer(fmt::format("{}.{}", name, key));
  };
  const auto window = integer(kGgufWindow);
  const bool slides = window && *window >= 0;
  if (name == "deepseek2") {
    // The runtime of these files knows GLM 4.7 Flash without the key by its sizes.
    const auto layers = integer("block_count").value_or(0);
    const bool flash = integer("vocab_size") == 154880 && (layers == 47 || layers == 48);
    const int64_t usual = flash ? kGgufSigmoid : kGgufSoftmax;
    const int64_t gating = integer("expert_gating_func").value_or(0);
    if ((gating == 0 ? usual : gating) != kGgufSigmoid) return "deepseek_v2";
  }
  if (naming.type == "olmo2" && slides) return "olmo3";
  // Mistral is llama with a sliding window.
  if (naming.type == "llama" && slides) return "mistral";
  return std::string(naming.type);
}

void AddDimensions(GgufConfigDraft* draft) {
  Json& config = draft->config();
  const GgufMetadata& metadata = draft->metadata();
  draft->Copy(kGgufCounts);
  draft->Copy(kGgufKvHeads);
  if (draft->Count("block_count") && draft->Layers() >= 0) {
    draft->Put("num_hidden_layers", draft->Layers());
  }
  draft->Put("num_nextn_predict_layers", draft->Count("nextn_predict_layers"));
  const Shape* const embedding = draft->Find("token_embd.weight");
  if (embedding != nullptr && embedding->rank() == 2) draft->Put("vocab_size", (*embedding)[0]);
  if (const auto epsilon = metadata.Real(draft->Key("attention.layer_norm_rms_epsilon"))) {
    config["rms_norm_eps"] = Shortest(*epsilon);
  }
  if (const auto epsilon = metadata.Real(draft->Key(kGgufNormEpsilon))) {
    draft->PutIfRead("layer_norm_eps", Shortest(*epsilon));
  }
  config["tie_word_embeddings"] = !draft->Has("output.weight");
  config["attention_bias"] = draft->AnyLayerHas("attn_q.bias");
  if (draft->architecture() == "qwen2moe") config["qkv_bias"] = draft->AnyLayerHas("attn_q.bias");
  if (draft->architecture() == "glm4moe") {
    config["use_qk_norm"] = draft->AnyLayerHas("attn_q_norm.weight");
  }
  draft->PutIfRead("mlp_bias", draft->AnyLayerHas("ffn_up.bias"));
  draft->PutIfRead("attention_out_bias", draft->AnyLayerHas("attn_output.bias"));
  for (const GgufCount& key : kGgufReals) {
    if (const auto value = metadata.Real(draft->Key(key.gguf))) {
      draft->PutIfRead(key.config, Shortest(*value));
    }
  }
  if (const auto context = draft->Count("rope.scaling.original_context_length")) {
    draft->PutIfRead("original_max_position_embeddings", static_cast<uint64_t>(*context));
  }
}

void AddHeadSize(GgufConfigDraft* draft) {
  std::optional<int64_t> size = draft->Count("attention.key_length");
  const std::optional<int64_t> hidden = draft->Count("embedding_length");
  const std::optional<int64_t> heads = draft->Count("attention.head_count");
  if (!size && hidden && heads && *heads > 0) size = *hidden / *heads;
  draft->Put("head_dim", size);
  const std::optional<int64_t> rotated = draft->Count("rope.dimension_count");
  const bool whole = !size || *size == 0 || !rotated || *rotated >= *size;
  if (rotated) draft->PutIfRead("rotary_dim", static_cast<uint64_t>(*rotated));
  if (size && hidden && heads && draft->IsRead("query_pre_attn_scalar")) {
    draft->Put("query_pre_attn_scalar", GgufGemmaScalar(draft->Layers(), *size, *hidden, *heads));
  }
  draft->config()["partial_rotary_factor"] =
      whole ? 1.0 : static_cast<double>(*rotated) / static_cast<double>(*size);
}

void AddTokens(GgufConfigDraft* draft) {
  const GgufMetadata& metadata = draft->metadata();
  const std::optional<int64_t> start = metadata.Integer("tokenizer.ggml.bos_token_id");
  if (start && *start >= 0 && *start <= INT32_MAX) draft->Put("bos_token_id", start);
  const std::vector<int64_t> ends = GgufEndTokens(metadata);
  if (ends.size() == 1) {
    draft->Put("eos_token_id", ends.front());
  } else if (!ends.empty()) {
    Json list = Json::array();
    for (const int64_t id : ends) list.push_back(static_cast<uint64_t>(id));
    draft->config()["eos_token_id"] = std::move(list);
  }
}

Json ValueOf(const GgufMetadata& metadata, std::string_view key) {
  if (const auto flag = metadata.Bool(key)) return *flag;
  if (const auto text = metadata.Text(key)) return std::string(*text);
  if (const auto integer = metadata.Integer(key)) return *integer;
  if (const auto real = metadata.Real(key)) return Shortest(*real);
  return "an array";
}

/// Values that the runtime of these files takes where they lack them.
Json OwnDefaults(const Json& config) {
  return {{"hidden_act", "silu"},
          {"hidden_activation", "gelu_pytorch_tanh"},
          {"num_key_value_heads", config.value("num_attention_heads", Json())},
          {"max_window_layers", 0},
          {"original_max_position_embeddings", config.value("max_position_embeddings", Json())},
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
          {"sliding_window_pattern", 4},
          {"moe_layer_start_index", 0},
          {"moe_layer_interval", 1},
          {"moe_layer_end_index", -1},
          {"moe_norm_min", 6.103515625e-05},
          {"num_nextn_predict_layers", 0}};
}

/// Drops what the type does not read. Values that the file lacks are its runtime's, never the
/// type's elsewhere: null for what the runtime requires, too, so that running the model names it.
/// Keys that are not understood are kept, so that running the model refuses those that change
/// results.
void AddOthers(GgufConfigDraft* draft) {
  Json& config = draft->config();
  for (auto at = config.begin(); at != config.end();) {
    const std::string_view treatment = KeyTreatment(draft->type(), at.key());
    const bool other = treatment == "suspect" || treatment == "ignored";
    at = other ? config.erase(at) : std::next(at);
  }
  if (draft->family() == nullptr) return;
  const Json own = OwnDefaults(config);
  for (const auto& [key, value] : draft->defaults().items()) {
    if (config.contains(key)) continue;
    config[key] = own.contains(key) ? own[key] : (value.is_boolean() ? Json(false) : Json());
  }
  const GgufMetadata& metadata = draft->metadata();
  if (metadata.Bool(draft->Key("attention.causal")) == false) config["is_causal"] = false;
  for (const std::string_view key : metadata.Keys(draft->Key(""))) {
    const std::string_view name = key.substr(draft->architecture().size() + 1);
    if (!IsUnderstood(*draft, name)) config[std::string(key)] = ValueOf(metadata, key);
  }
}

}  // namespace

GgufConfigDraft::GgufConfigDraft(const GgufArchitecture& architecture, std::string type,
                                 const GgufMetadata& metadata, const GgufTensorFacts& tensors)
    : architecture_(architecture), type_(std::move(type)), metadata_(metadata), tensors_(tensors) {
  if (const Result<const Family*> found = FindFamily(type_); found.ok()) family_ = *found;
  if (const Result<Json> read = ParseJsonObject(TypeDefaults(type_), "defaults"); read.ok()) {
    defaults_ = *read;
  }
  config_["model_type"] = type_;
}

std::string GgufConfigDraft::Key(std::string_view key) const {
  return fmt::format("{}.{}", architecture_.name, key);
}

std::optional<int64_t> GgufConfigDraft::Count(std::string_view key) const {
  const std::optional<int64_t> value = metadata_.Integer(Key(key));
  return value && *value >= 0 ? value : std::nullopt;
}

int64_t GgufConfigDraft::Layers() const {
  return Count("block_count").value_or(0) - Count("nextn_predict_layers").value_or(0);
}

bool GgufConfigDraft::AnyLayerHas(std::string_view tensor) const {
  constexpr int64_t kMostLayers = 1 << 12;
  for (int64_t layer = 0; layer < std::clamp<int64_t>(Layers(), 1, kMostLayers); ++layer) {
    if (Has(fmt::format("blk.{}.{}", layer, tensor))) return true;
  }
  return false;
}

void GgufConfigDraft::Put(std::string_view name, std::optional<int64_t> value) {
  if (value) config_[std::string(name)] = static_cast<uint64_t>(*value);
}

void GgufConfigDraft::PutIfRead(std::string_view name, const Json& value) {
  if (IsRead(name)) config_[std::string(name)] = value;
}

void GgufConfigDraft::Copy(const GgufCount& count) {
  if (!count.by_layer) return Put(count.config, Count(count.gguf));
  // A number for each layer, or one for all: the largest, since some layers may have none.
  const std::optional<std::vector<int64_t>> values = metadata_.Integers(Key(count.gguf));
  if (!values || values->empty()) return;
  const int64_t largest = *std::max_element(values->begin(), values->end());
  if (largest >= 0) Put(count.config, largest);
}

void GgufConfigDraft::Copy(std::span<const GgufCount> counts) {
  for (const GgufCount& count : counts) Copy(count);
}

bool HasGgufExperts(const GgufMetadata& metadata, std::string_view architecture) {
  return metadata.Integer(fmt::format("{}.expert_count", architecture)).value_or(0) > 0;
}

Json GgufConfig(const GgufNaming& naming, const GgufMetadata& metadata,
                const GgufTensorFacts& tensors) {
  const GgufArchitecture& architecture = *naming.architecture;
  GgufConfigDraft draft(architecture, ModelType(naming, metadata), metadata, tensors);
  AddDimensions(&draft);
  if (architecture.name == "deepseek2") {
    AddGgufLatentAttention(&draft);
  } else {
    AddHeadSize(&draft);
  }
  AddGgufWindows(&draft);
  if (HasGgufExperts(metadata, architecture.name)) AddGgufExperts(&draft);
  if (draft.IsRead("linear_num_key_heads")) AddGgufDeltaNets(&draft);
  draft.config()["rope_theta"] =
      Shortest(metadata.Real(draft.Key("rope.freq_base")).value_or(kTheta));
  const double window_base = metadata.Real(draft.Key(kGgufWindowBase)).value_or(kTheta);
  draft.PutIfRead("rope_local_base_freq", Shortest(window_base));
  const GgufRope rope(architecture, metadata, tensors.rope_factors);
  if (Json scaling = rope.Scaling(); !scaling.empty()) {
    draft.config()["rope_scaling"] = std::move(scaling);
  }
  AddTokens(&draft);
  AddOthers(&draft);
  return std::move(draft.config());
}

}  // namespace marlin
