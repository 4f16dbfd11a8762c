#include "checkpoint/writers/gguf_metadata.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>

#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/readers/gguf/gguf_keys.h"
#include "recipe/rope_parameters.h"
#include "recipe/text_config.h"
#include "recipe/typed_config.h"

namespace marlin {
namespace {

constexpr int64_t kMost = INT32_MAX;
constexpr double kMostReal = 1e30;
constexpr int64_t kQuantizationVersion = 2;

class ModelDescriber {
 public:
  ModelDescriber(TypedConfig typed, GgufMetadataBuilder* metadata)
      : typed_(std::move(typed)), config_(typed_.config), metadata_(metadata) {}

  Result<GgufModelFacts> Run() {
    const std::string type(typed_.family->model_type);
    facts_.architecture = FindGgufArchitectureOf(type, &facts_.with_experts);
    MARLIN_ASSIGN_OR_RETURN(rope_, ReadRopeParameters(typed_, RopeKind::kFullAttention));
    MARLIN_ASSIGN_OR_RETURN(const RopeParameters sliding,
                            ReadRopeParameters(typed_, RopeKind::kSlidingAttention));
    if (config_.Knows("layer_types") && !(sliding == rope_)) {
      return Status(Code::kUnsupported, fmt::format("{}: rope_parameters: GGUF has one RoPE for "
                                                    "all layers of a {}",
                                                    config_.file(), type));
    }
    metadata_->Text("general.architecture", facts_.architecture->name);
    metadata_->Count("general.quantization_version", kQuantizationVersion);
    AddDimensions(type);
    AddExperts();
    if (type == "gpt_oss") CheckGptOss();
    if (type == "deepseek_v3") AddLatentAttention();
    AddRotary();
    MARLIN_RETURN_IF_ERROR(config_.status());
    return std::move(facts_);
  }

 private:
  std::string Key(std::string_view key) const {
    return fmt::format("{}.{}", facts_.architecture->name, key);
  }
  void Copy(const GgufCount& key) {
    if (!config_.Has(key.config)) return;
    metadata_->Count(Key(key.gguf), config_.CountOr(key.config, kMost, 0));
  }

  void AddDimensions(const std::string& type) {
    const int64_t layers = config_.Size("num_hidden_layers", kMost);
    // The type's default says nothing of the tensors of this model.
    const bool says =
        typed_.source.Has("num_nextn_predict_layers") || typed_.source.Has("num_mtp_layers");
    const int64_t predicting =
        says ? config_.CountOr("num_nextn_predict_layers", kMost, 0) : int64_t{0};
    metadata_->Count(Key("block_count"), layers + predicting);
    if (says) metadata_->Count(Key("nextn_predict_layers"), predicting);
    for (const GgufCount& key : kGgufCounts) Copy(key);
    facts_.heads = config_.Size("num_attention_heads", kMost);
    facts_.kv_heads = config_.SizeOr("num_key_value_heads", kMost, facts_.heads);
    metadata_->Count(Key(kGgufKvHeads.gguf), facts_.kv_heads);
    metadata_->Real(Key("attention.layer_norm_rms_epsilon"), config_.Real("rms_norm_eps", 0, 1));
    for (const GgufCount& key : kGgufReals) {
      if (config_.Has(key.config)) {
        metadata_->Real(Key(key.gguf), config_.Real(key.config, -kMostReal, kMostReal));
      }
    }
    CheckRotatedLayers();
    const std::string activation = config_.StringOr("hidden_act", "silu");
    if (type != "gpt_oss" && activation != "silu" && activation != "swish") {
      config_.Fail("hidden_act", "gguf has no form for another than silu");
    }
    if (type != "deepseek_v3") AddHeadSize();
    if (config_.Bool("use_sliding_window", false)) {
      config_.Fail("use_sliding_window", fmt::format("gguf has no form for windows of a {}", type));
    }
    if (!config_.Knows("use_sliding_window")) {
      Copy({"sliding_window", "attention.sliding_window"});
    }
  }

  /// The runtime of these files leaves out RoPE in every fourth layer of types that read this key.
  void CheckRotatedLayers() {
    if (!config_.Knows("no_rope_layer_interval")) return;
    constexpr int64_t kInterval = 4;
    const std::vector<int64_t> rotated = config_.IntegersOrEmpty("no_rope_layers");
    bool usual =
        !rotated.empty() || config_.SizeOr("no_rope_layer_interval", kMost, kInterval) == kInterval;
    for (size_t i = 0; i < rotated.size(); ++i) {
      usual = usual && (rotated[i] != 0) == ((i + 1) % kInterval != 0);
    }
    if (!usual) {
      config_.Fail("no_rope_layers", "gguf has no form for others than every fourth layer");
    }
  }

  void AddHeadSize() {
    const int64_t hidden = config_.Size("hidden_size", kMost);
    const int64_t head =
        config_.SizeOr("head_dim", kMost, std::max<int64_t>(1, hidden / facts_.heads));
    facts_.head_dim = head;
    metadata_->Count(Key("attention.key_length"), head);
    metadata_->Count(Key("attention.value_length"), head);
    metadata_->Count(Key("rope.dimension_count"),
                     static_cast<int64_t>(static_cast<double>(head) * rope_.partial));
  }

  /// MLA with kv_b_proj as one matrix, whose codes are kept: splitting it would transpose the keys,
  /// whose groups then run along another dimension.
  void AddLatentAttention() {
    if (config_.Has("q_lora_rank")) Copy(kGgufLatentCounts[0]);
    metadata_->Count(Key(kGgufLatentCounts[1].gguf), config_.Size("kv_lora_rank", kMost));
    const int64_t rotated = config_.Size("qk_rope_head_dim", kMost / 2);
    metadata_->Count(Key("attention.key_length"),
                     config_.Size("qk_nope_head_dim", kMost / 2) + rotated);
    metadata_->Count(Key("attention.value_length"), config_.Size("v_head_dim", kMost));
    metadata_->Count(Key("rope.dimension_count"), rotated);
    if (!config_.Bool("rope_interleave", false)) {
      config_.Fail("rope_interleave", "gguf has no form for RoPE that rotates halves");
    }
  }

  /// Refuses values that these files take for granted to be others.
  void CheckGptOss() {
    constexpr double kLimit = 7.0;
    constexpr double kAlpha = 1.702;
    if (config_.Real("swiglu_limit", 0, kMostReal) != kLimit) {
      config_.Fail("swiglu_limit", "gguf has no form for another limit than 7");
    }
    if (config_.Real("swiglu_alpha", 0, kMostReal) != kAlpha) {
      config_.Fail("swiglu_alpha", "gguf has no form for another factor than 1.702");
    }
    const std::vector<std::string> types = config_.StringsOrEmpty("layer_types");
    for (size_t i = 0; i < types.size(); ++i) {
      if (types[i] == (i % 2 == 0 ? "sliding_attention" : "full_attention")) continue;
      config_.Fail("layer_types",
                   "gguf has no form for layers that do not alternate between "
                   "sliding_attention and full_attention");
    }
    metadata_->Count(Key("expert_feed_forward_length"), config_.Size("intermediate_size", kMost));
  }

  void AddExperts() {
    for (const char* const key : {"num_local_experts", "num_experts", "n_routed_experts"}) {
      if (config_.Has(key)) return AddExperts(config_.CountOr(key, kMost, 0));
    }
  }

  void AddExperts(int64_t experts) {
    if (experts == 0) return;
    metadata_->Count(Key("expert_count"), experts);
    for (const GgufCount& key : kGgufExpertCounts) Copy(key);
    if (config_.Has("routed_scaling_factor")) {
      metadata_->Real(Key("expert_weights_scale"),
                      config_.RealOr("routed_scaling_factor", 0, kMostReal, 1));
    }
    if (config_.Has("norm_topk_prob")) {
      metadata_->Flag(Key("expert_weights_norm"), config_.Bool("norm_topk_prob", false));
    }
    const std::string_view name = facts_.architecture->name;
    if (name == "glm4moe" || name == "deepseek2") {
      metadata_->Count(Key("expert_gating_func"), kGgufSigmoid);
    }
  }

  void AddRotary() {
    metadata_->Real(Key("rope.freq_base"), rope_.theta);
    const std::string_view type = RopeTypeName(rope_.type);
    switch (rope_.type) {
      case RopeType::kDefault:
        return;
      case RopeType::kLlama3:
        return AddLlama3();
      case RopeType::kLinear:
        metadata_->Text(Key("rope.scaling.type"), type);
        metadata_->Real(Key("rope.scaling.factor"), rope_.factor);
        return;
      case RopeType::kYarn:
        metadata_->Text(Key("rope.scaling.type"), type);
        return AddYarn();
      case RopeType::kLongRope:
        if (facts_.architecture->name == "phi3") return AddLongRope();
        [[fallthrough]];
      case RopeType::kDynamic:
      case RopeType::kProportional:
        config_.Fail("rope_scaling", fmt::format("gguf has no form for the type \"{}\"", type));
    }
  }

  void AddYarn() {
    metadata_->Real(Key("rope.scaling.factor"), rope_.factor);
    metadata_->Real(Key("rope.scaling.yarn_beta_fast"), rope_.beta_fast);
    metadata_->Real(Key("rope.scaling.yarn_beta_slow"), rope_.beta_slow);
    metadata_->Count(Key("rope.scaling.original_context_length"),
                     static_cast<int64_t>(rope_.original_context));
    // Whether the bounds of the interpolation are rounded is a fact of the architecture.
    const bool rounded = facts_.architecture->name != "gpt-oss";
    if (rope_.truncate != rounded) {
      config_.Fail("truncate", fmt::format("gguf has no form for another value than {} in a model "
                                           "of the architecture {}",
                                           rounded, facts_.architecture->name));
    }
    double inferred = YarnScale(rope_.factor, 1);
    if (facts_.architecture->name == "deepseek2" && rope_.mscale_all_dim != 0) {
      // DeepSeek's files hold a tenth of one number for both of these.
      if (rope_.mscale != rope_.mscale_all_dim) {
        config_.Fail("mscale", "gguf has no form for another value than that of mscale_all_dim");
      }
      metadata_->Real(Key("rope.scaling.yarn_log_multiplier"), rope_.mscale_all_dim / 10);
      inferred = 1;
    }
    // Multiplies the factor that follows from the others, unlike attention_factor.
    const double quotient = rope_.attention_factor / inferred;
    if (std::abs(quotient - 1) > 1e-12) {
      metadata_->Real(Key("rope.scaling.attn_factor"), quotient);
    }
  }

  /// Factors for texts within the trained context and beyond, one of each for a pair.
  void AddLongRope() {
    const bool old = !config_.Nested("rope_scaling").values().empty();
    ModelConfig scaling = config_.Nested(old ? "rope_scaling" : "rope_parameters");
    const auto add = [&](std::string_view key, const char* tensor) {
      std::vector<float> factors;
      for (const double factor : scaling.RealsOrEmpty(key, 0, kMostReal)) {
        factors.push_back(static_cast<float>(factor));
      }
      facts_.rope_factors.emplace_back(tensor, std::move(factors));
    };
    add("long_factor", "rope_factors_long.weight");
    add("short_factor", "rope_factors_short.weight");
    if (facts_.rope_factors[0].second.size() != facts_.rope_factors[1].second.size()) {
      config_.Fail("long_factor", "gguf needs one for every short_factor");
    }
    metadata_->Count(Key("rope.scaling.original_context_length"),
                     static_cast<int64_t>(rope_.original_context));
    metadata_->Real(Key("rope.scaling.attn_factor"), rope_.attention_factor);
  }

  /// Llama 3.1: a factor for every frequency, interpolated between those that are divided and those
  /// that stay.
  void AddLlama3() {
    std::vector<float> factors;
    for (int64_t i = 0; i < facts_.head_dim / 2; ++i) {
      const double frequency = std::pow(
          rope_.theta, -2.0 * static_cast<double>(i) / static_cast<double>(facts_.head_dim));
      const double turns = rope_.original_context * frequency / (2 * std::numbers::pi);
      const double smooth = std::clamp(
          (turns - rope_.low_freq_factor) / (rope_.high_freq_factor - rope_.low_freq_factor), 0.0,
          1.0);
      factors.push_back(static_cast<float>(1 / ((1 - smooth) / rope_.factor + smooth)));
    }
    facts_.rope_factors.emplace_back("rope_freqs.weight", std::move(factors));
  }

  TypedConfig typed_;
  ModelConfig& config_;
  RopeParameters rope_;
  GgufMetadataBuilder* metadata_;
  GgufModelFacts facts_;
};

}  // namespace

void AppendGgufText(std::string_view text, std::string* out) {
  AppendGgufNumber<uint64_t>(text.size(), out);
  out->append(text);
}

void AppendGgufStart(size_t tensors, int64_t values, std::string* out) {
  constexpr uint32_t kVersion = 3;
  out->append("GGUF");
  AppendGgufNumber(kVersion, out);
  AppendGgufNumber(static_cast<uint64_t>(tensors), out);
  AppendGgufNumber(static_cast<uint64_t>(values), out);
}

std::string GgufMetadataBuilder::Header() const {
  std::string file;
  AppendGgufStart(0, count_, &file);
  return file + bytes_;
}

void GgufMetadataBuilder::Key(std::string_view key, GgufType type) {
  ++count_;
  AppendGgufText(key, &bytes_);
  AppendGgufNumber(static_cast<uint32_t>(type), &bytes_);
}

void GgufMetadataBuilder::Array(std::string_view key, GgufType type, size_t count) {
  Key(key, GgufType::kArray);
  AppendGgufNumber(static_cast<uint32_t>(type), &bytes_);
  AppendGgufNumber<uint64_t>(count, &bytes_);
}

void GgufMetadataBuilder::Text(std::string_view key, std::string_view value) {
  Key(key, GgufType::kString);
  AppendGgufText(value, &bytes_);
}

void GgufMetadataBuilder::Count(std::string_view key, int64_t value) {
  Key(key, GgufType::kU32);
  AppendGgufNumber(static_cast<uint32_t>(value), &bytes_);
}

void GgufMetadataBuilder::Real(std::string_view key, double value) {
  Key(key, GgufType::kF32);
  AppendGgufNumber(static_cast<float>(value), &bytes_);
}

void GgufMetadataBuilder::Flag(std::string_view key, bool value) {
  Key(key, GgufType::kBool);
  AppendGgufNumber(static_cast<uint8_t>(value), &bytes_);
}

void GgufMetadataBuilder::Texts(std::string_view key, std::span<const std::string> values) {
  Array(key, GgufType::kString, values.size());
  for (const std::string& value : values) AppendGgufText(value, &bytes_);
}

void GgufMetadataBuilder::Integers(std::string_view key, std::span<const int32_t> values) {
  Array(key, GgufType::kI32, values.size());
  for (const int32_t value : values) AppendGgufNumber(value, &bytes_);
}

void GgufMetadataBuilder::Reals(std::string_view key, std::span<const float> values) {
  Array(key, GgufType::kF32, values.size());
  for (const float value : values) AppendGgufNumber(value, &bytes_);
}

void GgufMetadataBuilder::Split(uint16_t number, uint16_t count, int32_t tensors) {
  Key("split.no", GgufType::kU16);
  AppendGgufNumber(number, &bytes_);
  Key("split.count", GgufType::kU16);
  AppendGgufNumber(count, &bytes_);
  Key("split.tensors.count", GgufType::kI32);
  AppendGgufNumber(tensors, &bytes_);
}

Result<GgufModelFacts> DescribeGgufModel(const std::string& config_json, const std::string& where,
                                         GgufMetadataBuilder* metadata) {
  if (config_json.empty()) {
    return Status(Code::kUnsupported, where + ": gguf needs a config.json, and there is none");
  }
  MARLIN_ASSIGN_OR_RETURN(ModelConfig config, ModelConfig::Parse(config_json, where));
  bool with_experts = false;
  if (const std::string type = TextModelType(config.values());
      FindGgufArchitectureOf(type, &with_experts) == nullptr) {
    return Status(Code::kUnsupported,
                  fmt::format("{}: gguf cannot hold a model of type \"{}\"; known: {}", where,
                              Printable(type), fmt::join(GgufModelTypes(), ", ")));
  }
  MARLIN_ASSIGN_OR_RETURN(TypedConfig typed,
                          ReadTypedConfig(std::move(config), UnknownKeys::kRefuse));
  return ModelDescriber(std::move(typed), metadata).Run();
}

}  // namespace marlin
