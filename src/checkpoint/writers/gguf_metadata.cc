#include "checkpoint/writers/gguf_metadata.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <optional>

#include "base/macros.h"
#include "base/printable.h"
#include "recipe/model_config.h"

namespace marlin {
namespace {

constexpr int64_t kMost = INT32_MAX;
constexpr double kMostReal = 1e30;
constexpr int64_t kQuantizationVersion = 2;
constexpr int64_t kSigmoid = 2;  // A value of expert_gating_func.

/// A count of config.json and its key in the metadata, which begins with the architecture.
struct CountKey {
  std::string_view config;
  std::string_view gguf;
};
constexpr CountKey kCounts[] = {
    {"max_position_embeddings", "context_length"},
    {"hidden_size", "embedding_length"},
    {"intermediate_size", "feed_forward_length"},
    {"num_attention_heads", "attention.head_count"},
    {"vocab_size", "vocab_size"},
    {"num_nextn_predict_layers", "nextn_predict_layers"},
};
constexpr CountKey kExpertCounts[] = {
    {"num_experts_per_tok", "expert_used_count"},
    {"moe_intermediate_size", "expert_feed_forward_length"},
    {"shared_expert_intermediate_size", "expert_shared_feed_forward_length"},
    {"n_shared_experts", "expert_shared_count"},
    {"first_k_dense_replace", "leading_dense_block_count"},
    {"n_group", "expert_group_count"},
    {"topk_group", "expert_group_used_count"},
};

class ModelDescriber {
 public:
  ModelDescriber(ModelConfig config, GgufMetadataBuilder* metadata)
      : config_(std::move(config)), metadata_(metadata) {}

  Result<GgufModelFacts> Run(const std::string& where) {
    const std::string type = config_.StringOr("model_type", "");
    facts_.architecture = FindGgufArchitectureOf(type, &facts_.with_experts);
    if (facts_.architecture == nullptr) {
      return Status(Code::kUnsupported,
                    fmt::format("{}: gguf cannot hold a model of type \"{}\"; known: llama, "
                                "mistral, mixtral, qwen2, qwen3, qwen2_moe, qwen3_moe, glm4, "
                                "glm4_moe, gpt_oss, deepseek_v3",
                                where, Printable(type)));
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
  void Copy(const CountKey& key) {
    if (!config_.Has(key.config)) return;
    metadata_->Count(Key(key.gguf), config_.CountOr(key.config, kMost, 0));
  }

  void AddDimensions(const std::string& type) {
    const int64_t layers = config_.Size("num_hidden_layers", kMost);
    metadata_->Count(Key("block_count"),
                     layers + config_.CountOr("num_nextn_predict_layers", kMost, 0));
    for (const CountKey& key : kCounts) Copy(key);
    facts_.heads = config_.Size("num_attention_heads", kMost);
    facts_.kv_heads = config_.SizeOr("num_key_value_heads", kMost, facts_.heads);
    metadata_->Count(Key("attention.head_count_kv"), facts_.kv_heads);
    metadata_->Real(Key("attention.layer_norm_rms_epsilon"),
                    config_.RealOr("rms_norm_eps", 0, 1, 1e-6));
    if (type != "deepseek_v3") AddHeadSize();
    const bool qwen = type.starts_with("qwen");
    if (config_.Has("sliding_window") && (!qwen || config_.Bool("use_sliding_window", false))) {
      Copy({"sliding_window", "attention.sliding_window"});
    }
  }

  void AddHeadSize() {
    const int64_t hidden = config_.Size("hidden_size", kMost);
    const int64_t head =
        config_.SizeOr("head_dim", kMost, std::max<int64_t>(1, hidden / facts_.heads));
    metadata_->Count(Key("attention.key_length"), head);
    metadata_->Count(Key("attention.value_length"), head);
    ModelConfig rope = config_.Nested("rope_parameters");
    const double partial = rope.RealOr("partial_rotary_factor", 0, 1,
                                       config_.RealOr("partial_rotary_factor", 0, 1, 1));
    metadata_->Count(Key("rope.dimension_count"),
                     static_cast<int64_t>(static_cast<double>(head) * partial));
  }

  /// MLA with kv_b_proj as one matrix, whose codes are kept: splitting it would transpose the keys,
  /// whose groups then run along another dimension.
  void AddLatentAttention() {
    if (config_.Has("q_lora_rank")) Copy({"q_lora_rank", "attention.q_lora_rank"});
    metadata_->Count(Key("attention.kv_lora_rank"), config_.Size("kv_lora_rank", kMost));
    const int64_t rotated = config_.Size("qk_rope_head_dim", kMost / 2);
    metadata_->Count(Key("attention.key_length"),
                     config_.Size("qk_nope_head_dim", kMost / 2) + rotated);
    metadata_->Count(Key("attention.value_length"), config_.Size("v_head_dim", kMost));
    metadata_->Count(Key("rope.dimension_count"), rotated);
    if (!config_.Bool("rope_interleave", true)) {
      config_.Fail("rope_interleave", "gguf has no form for RoPE that rotates halves");
    }
  }

  /// Refuses values that these files take for granted to be others.
  void CheckGptOss() {
    constexpr double kLimit = 7.0;
    constexpr double kAlpha = 1.702;
    if (config_.RealOr("swiglu_limit", 0, kMostReal, kLimit) != kLimit) {
      config_.Fail("swiglu_limit", "gguf has no form for another limit than 7");
    }
    if (config_.RealOr("swiglu_alpha", 0, kMostReal, kAlpha) != kAlpha) {
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
    for (const CountKey& key : kExpertCounts) Copy(key);
    if (config_.Has("routed_scaling_factor")) {
      metadata_->Real(Key("expert_weights_scale"),
                      config_.RealOr("routed_scaling_factor", 0, kMostReal, 1));
    }
    if (config_.Has("norm_topk_prob")) {
      metadata_->Flag(Key("expert_weights_norm"), config_.Bool("norm_topk_prob", false));
    }
    const std::string_view name = facts_.architecture->name;
    if (name == "glm4moe" || name == "deepseek2") {
      metadata_->Count(Key("expert_gating_func"), kSigmoid);
    }
  }

  void AddRotary() {
    ModelConfig parameters = config_.Nested("rope_parameters");
    const double theta = parameters.RealOr("rope_theta", 1, kMostReal,
                                           config_.RealOr("rope_theta", 1, kMostReal, 10000));
    metadata_->Real(Key("rope.freq_base"), theta);
    ModelConfig scaling =
        config_.Has("rope_scaling") ? config_.Nested("rope_scaling") : std::move(parameters);
    const std::string type = scaling.StringOr("rope_type", scaling.StringOr("type", "default"));
    if (type == "llama3") {
      AddLlama3(&scaling, theta);
    } else if (type == "linear" || type == "yarn") {
      metadata_->Text(Key("rope.scaling.type"), type);
      AddScaling(&scaling);
      if (type == "yarn") CheckTruncation(&scaling);
      if (facts_.architecture->name == "deepseek2") AddMscale(&scaling);
    } else if (type != "default") {
      config_.Fail("rope_scaling",
                   fmt::format("gguf has no form for the type \"{}\"", Printable(type)));
    }
    if (!scaling.status().ok()) config_.Fail("rope_scaling", scaling.status().message().data());
  }

  void AddScaling(ModelConfig* scaling) {
    const std::pair<std::string_view, std::string_view> keys[] = {
        {"factor", "rope.scaling.factor"},
        {"beta_fast", "rope.scaling.yarn_beta_fast"},
        {"beta_slow", "rope.scaling.yarn_beta_slow"},
        {"attention_factor", "rope.scaling.attn_factor"},
    };
    for (const auto& [config, gguf] : keys) {
      if (scaling->Has(config)) {
        metadata_->Real(Key(gguf), scaling->RealOr(config, 0, kMostReal, 1));
      }
    }
    constexpr std::string_view kContext = "original_max_position_embeddings";
    if (scaling->Has(kContext)) {
      metadata_->Count(Key("rope.scaling.original_context_length"), scaling->Size(kContext, kMost));
    }
  }

  /// Whether the bounds of the interpolation are rounded is a fact of the architecture.
  void CheckTruncation(ModelConfig* scaling) {
    const bool rounded = facts_.architecture->name != "gpt-oss";
    if (scaling->Bool("truncate", true) == rounded) return;
    scaling->Fail("truncate", fmt::format("gguf has no form for another value than {} in a model "
                                          "of the architecture {}",
                                          rounded, facts_.architecture->name));
  }

  /// DeepSeek's files hold a tenth of one number for both of these.
  void AddMscale(ModelConfig* scaling) {
    const double all = scaling->RealOr("mscale_all_dim", 0, kMostReal, 0);
    if (scaling->RealOr("mscale", 0, kMostReal, 0) != all) {
      scaling->Fail("mscale", "gguf has no form for another value than that of mscale_all_dim");
    }
    if (all != 0) metadata_->Real(Key("rope.scaling.yarn_log_multiplier"), all / 10);
  }

  /// Llama 3.1: a factor for every frequency, interpolated between those that are divided and those
  /// that stay.
  void AddLlama3(ModelConfig* scaling, double theta) {
    const double factor = scaling->RealOr("factor", 1, kMostReal, 8);
    const double low = scaling->RealOr("low_freq_factor", 0, kMostReal, 1);
    const double high = scaling->RealOr("high_freq_factor", 0, kMostReal, 4);
    const auto context =
        static_cast<double>(scaling->SizeOr("original_max_position_embeddings", kMost, 8192));
    const int64_t hidden = config_.Size("hidden_size", kMost);
    const int64_t head = config_.SizeOr("head_dim", int64_t{1} << 20, hidden / facts_.heads);
    for (int64_t i = 0; i < head / 2; ++i) {
      const double frequency =
          std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head));
      const double turns = context * frequency / (2 * std::numbers::pi);
      const double smooth = std::clamp((turns - low) / (high - low), 0.0, 1.0);
      facts_.rope_factors.push_back(static_cast<float>(1 / ((1 - smooth) / factor + smooth)));
    }
  }

  ModelConfig config_;
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
  return ModelDescriber(std::move(config), metadata).Run(where);
}

}  // namespace marlin
