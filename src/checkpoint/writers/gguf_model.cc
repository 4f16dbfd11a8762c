// The metadata of a GGUF file that describe a model.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/readers/gguf/gguf_keys.h"
#include "checkpoint/writers/gguf_forms.h"
#include "checkpoint/writers/gguf_metadata.h"
#include "recipe/text_config.h"
#include "recipe/typed_config.h"

namespace marlin {
namespace {

constexpr int64_t kQuantizationVersion = 2;

class ModelDescriber {
 public:
  ModelDescriber(TypedConfig typed, Dimensions dimensions, GgufMetadataBuilder* metadata)
      : typed_(std::move(typed)),
        config_(typed_.config),
        dimensions_(std::move(dimensions)),
        metadata_(metadata) {
    facts_.naming = GgufNamingOf(typed_.family->model_type);
  }

  Result<GgufModelFacts> Run() {
    metadata_->Text("general.architecture", facts_.naming.architecture->name);
    metadata_->Count("general.quantization_version", kQuantizationVersion);
    CheckGgufForm(typed_, dimensions_, facts_.naming);
    AddDimensions();
    AddExperts();
    if (typed_.family->mixer == MixerKind::kLatentAttention) {
      AddLatentAttention();
    } else {
      AddHeadSize();
    }
    if (dimensions_.delta_value_heads > 0) AddDeltaNets();
    MARLIN_RETURN_IF_ERROR(config_.status());
    MARLIN_RETURN_IF_ERROR(DescribeGgufRotary(typed_, &facts_, metadata_));
    MARLIN_RETURN_IF_ERROR(config_.status());
    return std::move(facts_);
  }

 private:
  std::string Key(std::string_view key) const {
    return fmt::format("{}.{}", facts_.naming.architecture->name, key);
  }
  void Copy(const GgufCount& key) {
    if (!config_.Has(key.config)) return;
    metadata_->Count(Key(key.gguf), config_.CountOr(key.config, kMostGgufCount, 0));
  }

  void AddDimensions() {
    // The type's default says nothing of the tensors of this model. A module of its own is left
    // out.
    const bool says =
        typed_.family->prediction->module.empty() &&
        (typed_.source.Has("num_nextn_predict_layers") || typed_.source.Has("num_mtp_layers"));
    const int64_t predicting =
        says ? config_.CountOr("num_nextn_predict_layers", kMostGgufCount, 0) : int64_t{0};
    metadata_->Count(Key("block_count"), dimensions_.layers + predicting);
    if (says) metadata_->Count(Key("nextn_predict_layers"), predicting);
    for (const GgufCount& key : kGgufCounts) Copy(key);
    facts_.heads = GgufDeltaHeads(dimensions_);
    facts_.heads.queries = dimensions_.heads;
    facts_.heads.keys = dimensions_.kv_heads;
    metadata_->Count(Key(kGgufKvHeads.gguf), dimensions_.kv_heads);
    const bool layer_norms = typed_.family->layer_norms;
    metadata_->Real(Key(layer_norms ? kGgufNormEpsilon : "attention.layer_norm_rms_epsilon"),
                    config_.Real(layer_norms ? "layer_norm_eps" : "rms_norm_eps", 0, 1));
    for (const GgufCount& key : kGgufReals) {
      if (config_.Has(key.config)) {
        metadata_->Real(Key(key.gguf), config_.Real(key.config, -kMostGgufReal, kMostGgufReal));
      }
    }
    AddWindows();
  }

  void AddWindows() {
    const std::vector<bool> windowed = GgufWindowedLayers(config_, dimensions_);
    if (!windowed.empty()) {
      if (!config_.Has("sliding_window")) return;
      metadata_->Flags(Key(kGgufWindowPattern), windowed);
    }
    // Windows of these types have no form, and are checked.
    if (config_.Knows("use_sliding_window") || config_.Knows("max_window_layers")) return;
    Copy({"sliding_window", kGgufWindow});
  }

  void AddHeadSize() {
    facts_.head_dim = dimensions_.head_dim;
    metadata_->Count(Key("attention.key_length"), dimensions_.head_dim);
    metadata_->Count(Key("attention.value_length"), dimensions_.head_dim);
  }

  /// MLA with kv_b_proj as one matrix, whose codes are kept: splitting it would transpose the keys,
  /// whose groups then run along another dimension.
  void AddLatentAttention() {
    if (dimensions_.q_rank > 0) Copy(kGgufLatentCounts[0]);
    metadata_->Count(Key(kGgufLatentCounts[1].gguf), dimensions_.kv_rank);
    metadata_->Count(Key("attention.key_length"), dimensions_.nope_dim + dimensions_.rope_dim);
    metadata_->Count(Key("attention.value_length"), dimensions_.v_dim);
    metadata_->Count(Key("rope.dimension_count"), dimensions_.rope_dim);
  }

  void AddDeltaNets() {
    const Dimensions& d = dimensions_;
    for (const GgufCount& key : kGgufDeltaCounts) Copy(key);
    metadata_->Count(Key(kGgufDeltaInner), facts_.heads.value_rows());
    std::vector<bool> recurrent;
    for (int64_t layer = 0; layer < d.layers; ++layer) {
      recurrent.push_back(MixerOfLayer(*typed_.family, d, layer) == MixerKind::kGatedDelta);
    }
    // Older programs know the interval alone.
    const auto first = std::find(recurrent.begin(), recurrent.end(), false);
    const int64_t interval = first - recurrent.begin() + 1;
    metadata_->Count(Key(kGgufInterval), interval);
    metadata_->Flags(Key(kGgufRecurrentLayers), recurrent);
  }

  void AddExperts() {
    if (dimensions_.experts == 0) return;
    metadata_->Count(Key("expert_count"), dimensions_.experts);
    metadata_->Count(Key("expert_used_count"), dimensions_.top_k);
    AddSparseLayers();
    // Programs that read these files choose groups as DeepSeek V3 does.
    const bool groups = typed_.family->router != RouterRule::kSoftmaxByMethod;
    for (const GgufCount& key : kGgufExpertCounts) {
      const bool own = key.config == "num_experts_per_tok" ||
                       key.config.starts_with("moe_layer_") ||
                       key.config == "first_k_dense_replace";
      if (!own && (groups || !key.config.ends_with("_group"))) Copy(key);
    }
    if (typed_.family->shared == SharedExperts::kOne ||
        typed_.family->sparse == SparseRule::kInRange) {
      if (dimensions_.shared_width > 0) {
        metadata_->Count(Key("expert_shared_feed_forward_length"), dimensions_.shared_width);
      }
    }
    if (typed_.family->experts->width_key == "intermediate_size") {
      metadata_->Count(Key(kGgufExpertWidth), dimensions_.expert_width);
    }
    if (config_.Has("routed_scaling_factor")) {
      metadata_->Real(Key("expert_weights_scale"),
                      config_.RealOr("routed_scaling_factor", 0, kMostGgufReal, 1));
    }
    if (config_.Has("norm_topk_prob")) {
      metadata_->Flag(Key("expert_weights_norm"), config_.Bool("norm_topk_prob", false));
    }
    const RouterRule router = typed_.family->router;
    if (router == RouterRule::kSigmoid || router == RouterRule::kSigmoidNormalized) {
      metadata_->Count(Key("expert_gating_func"), kGgufSigmoid);
    } else if (router == RouterRule::kSoftmaxByMethod) {
      metadata_->Count(Key("expert_gating_func"), kGgufSoftmax);
    }
  }

  void AddSparseLayers() {
    const SparseRule sparse = typed_.family->sparse;
    if (sparse != SparseRule::kAfterFirst && sparse != SparseRule::kInRange) return;
    int64_t first = 0;
    while (first < dimensions_.layers && !IsSparse(*typed_.family, dimensions_, first)) ++first;
    metadata_->Count(Key("leading_dense_block_count"), first);
    if (sparse == SparseRule::kInRange) metadata_->Count(Key("interleave_moe_layer_step"), 1);
  }

  TypedConfig typed_;
  ModelConfig& config_;
  Dimensions dimensions_;
  GgufMetadataBuilder* metadata_;
  GgufModelFacts facts_;
};

}  // namespace

Result<GgufModelFacts> DescribeGgufModel(const std::string& config_json, const std::string& where,
                                         GgufMetadataBuilder* metadata) {
  if (config_json.empty()) {
    return Status(Code::kUnsupported, where + ": gguf needs a config.json, and there is none");
  }
  MARLIN_ASSIGN_OR_RETURN(ModelConfig config, ModelConfig::Parse(config_json, where));
  if (const std::string type = TextModelType(config.values()); !GgufNamingOf(type).known()) {
    return Status(Code::kUnsupported,
                  fmt::format("{}: gguf cannot hold a model of type \"{}\"; known: {}", where,
                              Printable(type), fmt::join(GgufModelTypes(), ", ")));
  }
  MARLIN_ASSIGN_OR_RETURN(TypedConfig typed,
                          ReadTypedConfig(std::move(config), UnknownKeys::kRefuse));
  MARLIN_ASSIGN_OR_RETURN(Dimensions dimensions, ReadDimensions(*typed.family, typed.config));
  return ModelDescriber(std::move(typed), std::move(dimensions), metadata).Run();
}

}  // namespace marlin
