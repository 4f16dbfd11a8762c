#include "recipe/decoder_shape.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "recipe/mixer.h"

namespace marlin {
namespace {

// As kMaxWidth: far above every published model.
constexpr int64_t kMaxVocabulary = int64_t{1} << 24;
constexpr int64_t kMaxLayers = int64_t{1} << 12;
constexpr int64_t kMaxExperts = int64_t{1} << 14;
constexpr int64_t kMaxTensors = int64_t{1} << 20;

// Values of layer_types.
constexpr std::string_view kLinearAttention = "linear_attention";
constexpr std::string_view kFullAttention = "full_attention";

constexpr ExpertStyle kUsualExperts = {};
constexpr ExpertStyle kStackedExperts = {.stacked = true};
constexpr ExpertStyle kErnieExperts = {.correction_bias = "moe_statics.e_score_correction_bias",
                                       .correction_row = true};
constexpr ExpertStyle kHunyuanExperts = {
    .router = "gate.wg", .shared = "shared_mlp", .width_key = "intermediate_size"};
constexpr ExpertStyle kExaoneExperts = {.correction_bias = "e_score_correction_bias"};
constexpr ExpertStyle kHyExperts = {
    .router = "router.gate", .correction_bias = "expert_bias", .shared = "shared_mlp"};
constexpr ExpertStyle kLlama4Experts = {.block = "feed_forward",
                                        .router = "router",
                                        .shared = "shared_expert",
                                        .stacked = true,
                                        .width_key = "intermediate_size"};
constexpr ExpertStyle kWideExperts = {.width_key = "intermediate_size"};
constexpr ExpertStyle kMinimaxExperts = {.block = kExpertBlocks[1],
                                         .correction_bias = "e_score_correction_bias",
                                         .short_names = true,
                                         .width_key = "intermediate_size"};
constexpr ExpertStyle kMixtralExperts = {
    .block = kExpertBlocks[1], .short_names = true, .width_key = "intermediate_size"};
constexpr ExpertStyle kGptOssExperts = {.router = "router",
                                        .router_bias = true,
                                        .stacked = true,
                                        .interleaved = true,
                                        .biases = true,
                                        .width_key = "intermediate_size"};

constexpr ExpertStyle kGraniteExperts = {.block = kExpertBlocks[1],
                                         .router = "router.layer",
                                         .stacked = true,
                                         .stacks = {"input_linear.weight", "output_linear.weight"},
                                         .width_key = "intermediate_size"};

constexpr NormNames kGlm4Norms = {"input_layernorm", "post_self_attn_layernorm",
                                  "post_attention_layernorm", "post_mlp_layernorm"};

constexpr NormNames kOneNorm = {"input_layernorm", "", "", ""};
constexpr NormNames kOutNorms = {"", "post_attention_layernorm", "", "post_feedforward_layernorm"};
constexpr NormNames kVaultNorms = {"input_layernorm", "", "pre_feedforward_layernorm", ""};
constexpr NormNames kPostNorms = {"input_layernorm", "post_norm1", "post_attention_layernorm",
                                  "post_norm2"};
constexpr NormNames kGemmaNorms = {"input_layernorm", "post_attention_layernorm",
                                   "pre_feedforward_layernorm", "post_feedforward_layernorm"};

constexpr Family kFamilies[] = {
#include "recipe/families.def"
};

/// mlp_layer_types lists for each layer whether it has experts; without the list all but the first
/// first_k_dense_replace do, or all but the first one where a type does not know that key.
void ReadMlpKinds(ModelConfig& config, Dimensions* d) {
  const std::vector<std::string> kinds = config.StringsOrEmpty("mlp_layer_types");
  if (kinds.empty()) {
    d->first_dense = config.Knows("first_k_dense_replace")
                         ? config.Count("first_k_dense_replace", kMaxLayers)
                         : 1;
    return;
  }
  if (static_cast<int64_t>(kinds.size()) != d->layers) {
    config.Fail("mlp_layer_types",
                fmt::format("{} entries for {} layers", kinds.size(), d->layers));
    return;
  }
  for (size_t layer = 0; layer < kinds.size(); ++layer) {
    if (kinds[layer] == "dense") {
      d->dense_layers.push_back(static_cast<int64_t>(layer));
    } else if (kinds[layer] != "sparse") {
      config.Fail("mlp_layer_types", fmt::format("entry {} is neither dense nor sparse", layer));
      return;
    }
  }
}

void ReadSparseRange(ModelConfig& config, Dimensions* d) {
  const int64_t first = config.Count("moe_layer_start_index", kMaxLayers);
  const int64_t last = config.IntegerOr("moe_layer_end_index", -1, kMaxLayers, -1);
  const int64_t interval = config.Size("moe_layer_interval", kMaxLayers);
  for (int64_t layer = 0; layer < d->layers && config.status().ok(); ++layer) {
    const bool in_range = layer >= first && (last == -1 || layer <= last);
    if (!in_range || (layer + 1) % interval != 0) d->dense_layers.push_back(layer);
  }
}

void ReadMoeLayers(ModelConfig& config, Dimensions* d) {
  const bool listed = config.Has("moe_layers");
  const std::vector<int64_t> sparse = config.IntegersOrEmpty("moe_layers");
  const int64_t step = config.Size("interleave_moe_layer_step", kMaxLayers);
  for (int64_t layer = 0; layer < d->layers && config.status().ok(); ++layer) {
    const bool has = listed ? std::find(sparse.begin(), sparse.end(), layer) != sparse.end()
                            : (layer + 1) % step == 0;
    if (!has) d->dense_layers.push_back(layer);
  }
}

/// A number, or a list of the layers' numbers, which must be equal.
int64_t SizeOfLayers(ModelConfig& config, std::string_view key, int64_t max, int64_t layers) {
  if (!config.IsList(key)) return config.Size(key, max);
  const std::vector<int64_t> all = config.IntegersOrEmpty(key);
  if (!config.status().ok()) return 1;
  const bool equal = !all.empty() && std::count(all.begin(), all.end(), all[0]) == std::ssize(all);
  if (!equal || std::ssize(all) < layers || all[0] < 1 || all[0] > max) {
    config.Fail(
        key, fmt::format("expected the same number in 1..{} for each of {} layers", max, layers));
    return 1;
  }
  return all[0];
}

void ReadExperts(const Family& family, ModelConfig& config, Dimensions* d) {
  if (family.experts == nullptr) return;
  constexpr std::array<std::string_view, 3> kCounts = {"num_experts", "num_local_experts",
                                                       "n_routed_experts"};
  d->experts = config.SizeOfAny(kCounts, kMaxExperts);
  d->top_k = SizeOfLayers(config, "num_experts_per_tok", kMaxExperts, d->layers);
  if (d->top_k > d->experts) {
    config.Fail("num_experts_per_tok", fmt::format("{} of {} experts", d->top_k, d->experts));
  }
  if (family.scales_expert_inputs && d->top_k > 1) {
    config.Fail("num_experts_per_tok",
                fmt::format("{}: only one expert's input is scaled by its weight", d->top_k));
  }
  d->expert_width = config.Size(family.experts->width_key, kMaxWidth);
  if (family.shared == SharedExperts::kGated) {
    d->shared_width = config.Size("shared_expert_intermediate_size", kMaxWidth);
  } else if (family.shared == SharedExperts::kPlain) {
    d->shared_width = d->expert_width * config.CountOr("n_shared_experts", 64, 0);
  } else if (family.shared == SharedExperts::kOne) {
    d->shared_width = d->expert_width;
  }
  if (family.sparse == SparseRule::kByStep) {
    d->sparse_step = config.Size("decoder_sparse_step", kMaxLayers);
    d->dense_layers = config.IntegersOrEmpty("mlp_only_layers");
  } else if (family.sparse == SparseRule::kInRange) {
    ReadSparseRange(config, d);
  } else if (family.sparse == SparseRule::kByMoeLayers) {
    ReadMoeLayers(config, d);
  } else if (family.sparse == SparseRule::kAfterFirst) {
    d->prediction_layers = config.CountOr("num_nextn_predict_layers", 16, 0);
    if (config.Knows("mlp_layer_types")) {
      ReadMlpKinds(config, d);
    } else {
      d->first_dense = config.Count("first_k_dense_replace", kMaxLayers);
    }
  }
}

/// Reads the mixer of each layer of a family with two: from layer_types, otherwise every
/// full_attention_interval-th layer has the family's own. Errors: kUnsupported naming a type.
Status ReadMixers(const Family& family, ModelConfig& config, Dimensions* d) {
  if (family.linear_mixer == family.mixer) return {};
  ParametersOf(family.linear_mixer).ReadSizes(family, config, d);
  const std::vector<std::string> types = config.StringsOrEmpty("layer_types");
  const int64_t interval =
      types.empty() ? config.Size("full_attention_interval", kMaxLayers) : int64_t{1};
  MARLIN_RETURN_IF_ERROR(config.status());
  if (!types.empty() && static_cast<int64_t>(types.size()) != d->layers) {
    config.Fail("layer_types", fmt::format("{} entries for {} layers", types.size(), d->layers));
    return config.status();
  }
  for (int64_t layer = 0; layer < d->layers; ++layer) {
    std::string_view type = (layer + 1) % interval == 0 ? kFullAttention : kLinearAttention;
    if (!types.empty()) type = types[static_cast<size_t>(layer)];
    if (type != kLinearAttention && type != kFullAttention) {
      return Status(Code::kUnsupported, fmt::format("{}: layer_types: '{}' is not supported",
                                                    config.file(), Printable(type)));
    }
    d->mixers.push_back(type == kLinearAttention ? family.linear_mixer : family.mixer);
  }
  return {};
}

}  // namespace

std::span<const Family> AllFamilies() { return kFamilies; }

Result<const Family*> FindFamily(const std::string& model_type) {
  std::string known;
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) return &family;
    known += known.empty() ? "" : ", ";
    known += family.model_type;
  }
  return Status(Code::kUnsupported,
                fmt::format("config.json: model_type '{}' is not known; known: {}",
                            Printable(model_type), known));
}

std::string_view TypeDefaults(std::string_view model_type) {
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) return family.defaults;
  }
  return {};
}

void ReadHeads(const Family& family, ModelConfig& config, Dimensions* d) {
  d->heads = config.Size("num_attention_heads", kMaxHeads);
  d->kv_heads = config.SizeOr("num_key_value_heads", kMaxHeads, d->heads);
  d->output_gate = family.output_gate;
  switch (family.qkv_bias) {
    case BiasRule::kNone:
      break;
    case BiasRule::kAlways:
      d->qkv_bias = true;
      break;
    case BiasRule::kByAttentionBias:
      d->qkv_bias = config.Bool("attention_bias", false);
      break;
    case BiasRule::kByQkvBias:
      d->qkv_bias = config.Bool("qkv_bias", false);
      break;
  }
  d->o_bias =
      family.own_o_bias ? config.Bool("attention_out_bias", false) : family.o_bias && d->qkv_bias;
  const bool asks =
      family.qk_norm == QkNormRule::kByUseQkNorm || family.qk_norm == QkNormRule::kPlainAfterRotary;
  d->qk_norm = asks ? config.Bool("use_qk_norm", false) : family.qk_norm != QkNormRule::kNone;
}

Result<Dimensions> ReadDimensions(const Family& family, ModelConfig& config) {
  Dimensions d;
  d.hidden = config.Size("hidden_size", kMaxWidth);
  d.layers = config.Size("num_hidden_layers", kMaxLayers);
  d.vocabulary = config.Size("vocab_size", kMaxVocabulary);
  // Types whose layers all have experts do not know the key.
  if (config.Knows(family.mlp_width_key) || family.experts == nullptr) {
    d.intermediate = config.Size(family.mlp_width_key, kMaxWidth);
  }
  d.mlp_bias = family.mlp_bias && config.Bool("mlp_bias", false);
  d.tied = config.Bool("tie_word_embeddings", false);
  ParametersOf(family.mixer).ReadSizes(family, config, &d);
  MARLIN_RETURN_IF_ERROR(ReadMixers(family, config, &d));
  ReadExperts(family, config, &d);
  MARLIN_RETURN_IF_ERROR(config.status());
  const auto tensors =
      (Checked(d.layers + d.prediction_layers) * (Checked(3) * Checked(d.experts) + Checked(24)))
          .Take();
  if (!tensors || *tensors > kMaxTensors) {
    return Status(Code::kMalformedFile,
                  fmt::format("config.json: {} layers with {} experts are more than {} tensors",
                              d.layers, d.experts, kMaxTensors));
  }
  return d;
}

MixerKind MixerOfLayer(const Family& family, const Dimensions& dimensions, int64_t layer) {
  const std::vector<MixerKind>& mixers = dimensions.mixers;
  return mixers.empty() ? family.mixer : mixers[static_cast<size_t>(layer)];
}

Dimensions DimensionsOfLayer(const Dimensions& dimensions, int64_t layer) {
  Dimensions own = dimensions;
  // Lists of layers are the model's: one in every layer would be as many squared.
  for (auto* const list : {&own.dense_layers, &own.global_layers, &own.unindexed_layers}) {
    *list = std::vector<int64_t>();
  }
  own.mixers = std::vector<MixerKind>();
  own.layer_heads = std::vector<LayerHeads>();
  const std::vector<int64_t>& unindexed = dimensions.unindexed_layers;
  if (std::find(unindexed.begin(), unindexed.end(), layer) != unindexed.end()) own.index_dim = 0;
  if (dimensions.layer_heads.empty()) return own;
  const LayerHeads& heads = dimensions.layer_heads[static_cast<size_t>(layer)];
  own.head_dim = heads.head_dim;
  own.kv_heads = heads.kv_heads;
  own.keys_are_values = heads.keys_are_values;
  return own;
}

bool IsSparse(const Family& family, const Dimensions& dimensions, int64_t layer) {
  if (family.experts == nullptr) return false;
  const std::vector<int64_t>& dense = dimensions.dense_layers;
  if (std::find(dense.begin(), dense.end(), layer) != dense.end()) return false;
  switch (family.sparse) {
    case SparseRule::kAllLayers:
    case SparseRule::kInRange:
    case SparseRule::kByMoeLayers:
      return true;
    case SparseRule::kByStep:
      return (layer + 1) % dimensions.sparse_step == 0;
    case SparseRule::kAfterFirst:
      return layer >= dimensions.first_dense;
  }
  return false;
}

}  // namespace marlin
