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

/// A value of layer_types, in families with two mixers.
struct LayerType {
  std::string_view name;
  MixerKind linear_mixer;  ///< The one of the families that know the type.
  bool linear;             ///< The layer has it.
  bool mlp = false;        ///< The layer has no mixer, but an MLP ...
  bool experts = false;    ///< ... or experts.
};
constexpr LayerType kLayerTypes[] = {
    {"linear_attention", MixerKind::kGatedDelta, true},
    {"full_attention", MixerKind::kGatedDelta, false},
    {"linear_attention", MixerKind::kMamba2, true},
    {"full_attention", MixerKind::kMamba2, false},
    {"mamba", MixerKind::kMamba2, true},
    {"attention", MixerKind::kMamba2, false},
    {"mlp", MixerKind::kMamba2, false, true},
    {"moe", MixerKind::kMamba2, false, true, true},
    {"conv", MixerKind::kShortConvolution, true},
    {"full_attention", MixerKind::kShortConvolution, false},
};

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

constexpr ExpertStyle kLfm2Experts = {
    .block = "feed_forward", .correction_bias = "expert_bias", .short_names = true};

constexpr MlpNames kLlama4Mlp = {.block = "feed_forward"};
constexpr MlpNames kUpMlp = {.gate = {}};
constexpr MlpNames kLfm2Mlp = {.block = "feed_forward", .gate = "w1", .up = "w3", .down = "w2"};
constexpr MlpNames kGraniteMlp = {
    .block = "shared_mlp", .down = "output_linear", .gate_up = "input_linear"};
constexpr MixerNames kLfm2Mixers = {.out = "out_proj", .linear = "conv"};
constexpr MixerNames kMambaMixers = {.linear = "mamba"};

// Layers of nemotron_h have one block each.
constexpr MixerNames kNemotronMixers = {.attention = "mixer", .linear = "mixer"};
constexpr MlpNames kNemotronMlp = {.block = "mixer", .gate = {}};
constexpr ExpertStyle kNemotronExperts = {.block = "mixer",
                                          .stacks = {"experts.up_proj", "experts.down_proj"}};
constexpr NormNames kNemotronNorms = {"norm", "", "norm", ""};
constexpr NamePrefix kNemotronPrefixes[] = {
    {"backbone.embeddings.", "model.embed_tokens."},
    {"backbone.norm_f.", "model.norm."},
    {"backbone.", "model."},
    {"model.embeddings.", "model.embed_tokens."},
    {"model.norm_f.", "model.norm."},
};

constexpr NormNames kLfm2Norms = {"operator_norm", "", "ffn_norm", ""};
constexpr ExpertStyle kGemma4Experts = {.block = "",
                                        .router = "router.proj",
                                        .stacked = true,
                                        .router_norm = "router.scale",
                                        .scales = "router.per_expert_scale"};

constexpr NormNames kGlm4Norms = {"input_layernorm", "post_self_attn_layernorm",
                                  "post_attention_layernorm", "post_mlp_layernorm"};

constexpr NormNames kOneNorm = {"input_layernorm", "", "", ""};
constexpr NormNames kOutNorms = {"", "post_attention_layernorm", "", "post_feedforward_layernorm"};
constexpr NormNames kVaultNorms = {"input_layernorm", "", "pre_feedforward_layernorm", ""};
constexpr NormNames kPostNorms = {"input_layernorm", "post_norm1", "post_attention_layernorm",
                                  "post_norm2"};
constexpr NormNames kGemmaNorms = {"input_layernorm", "post_attention_layernorm",
                                   "pre_feedforward_layernorm", "post_feedforward_layernorm"};

constexpr NormNames kGemma4Norms = {"input_layernorm",
                                    "post_attention_layernorm",
                                    "pre_feedforward_layernorm",
                                    "post_feedforward_layernorm",
                                    "pre_feedforward_layernorm_2",
                                    "post_feedforward_layernorm_2",
                                    "post_feedforward_layernorm_1"};

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
  // Every layer is dense or has no MLP.
  if (family.one_block && std::ssize(d->dense_layers) == d->layers) return;
  if (family.shared == SharedExperts::kMlp) {
    d->intermediate = config.Count("shared_intermediate_size", kMaxWidth);
    if (config.CountOr("num_local_experts", kMaxExperts, 0) == 0) return;
    d->shared_width = d->intermediate;
  }
  if (!family.experts_key.empty() && !config.Bool(family.experts_key, false)) return;
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
  d->choice_bias = config.Bool("use_expert_bias", true);
  if (family.shared == SharedExperts::kGated) {
    d->shared_width = config.Size("shared_expert_intermediate_size", kMaxWidth);
  } else if (family.shared == SharedExperts::kPlain) {
    d->shared_width = d->expert_width * config.CountOr("n_shared_experts", 64, 0);
  } else if (family.shared == SharedExperts::kOwn) {
    d->shared_width = config.Size("moe_shared_expert_intermediate_size", kMaxWidth);
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
    if (config.Knows("mlp_layer_types")) {
      ReadMlpKinds(config, d);
    } else {
      d->first_dense = config.Count("first_k_dense_replace", kMaxLayers);
    }
  }
}

/// The sizes of the embeddings that every layer has of its own.
void ReadLayerEmbeddings(ModelConfig& config, Dimensions* d) {
  constexpr std::string_view kVocabulary = "vocab_size_per_layer_input";
  d->layer_features = config.CountOr("hidden_size_per_layer_input", kMaxWidth, 0);
  if (d->layer_features == 0) return;
  d->layer_vocabulary = config.Size(kVocabulary, kMaxVocabulary);
  if (config.status().ok() && d->layer_vocabulary < d->vocabulary) {
    config.Fail(kVocabulary,
                fmt::format("{}, but vocab_size is {}", d->layer_vocabulary, d->vocabulary));
  }
}

/// The value of layer_types of every layer in a config without the key.
std::vector<std::string> UsualLayerTypes(const Family& family, ModelConfig& config,
                                         const Dimensions& d) {
  std::vector<std::string> types;
  const std::vector<int64_t> listed = config.IntegersOrEmpty("full_attn_idxs");
  const bool by_list = config.Knows("full_attn_idxs");
  // Types that know none of the keys have the other mixer in all layers.
  const int64_t interval = config.Knows("full_attention_interval")
                               ? config.Size("full_attention_interval", kMaxLayers)
                               : kMaxLayers + 1;
  const auto name_of = [&](bool linear) {
    const auto* const found =
        std::find_if(std::begin(kLayerTypes), std::end(kLayerTypes), [&](const LayerType& type) {
          return type.linear_mixer == family.linear_mixer && type.linear == linear;
        });
    return std::string(found->name);
  };
  for (int64_t layer = 0; layer < d.layers && config.status().ok(); ++layer) {
    const bool in_list = config.IsNull("full_attn_idxs") ||
                         std::find(listed.begin(), listed.end(), layer) != listed.end();
    types.push_back(name_of(by_list ? !in_list : (layer + 1) % interval != 0));
  }
  return types;
}

/// The values of layer_types that a hybrid_override_pattern stands for, a letter each.
std::vector<std::string> TypesOfPattern(ModelConfig& config) {
  constexpr std::string_view kKey = "hybrid_override_pattern";
  std::vector<std::string> types;
  if (!config.Has(kKey)) return types;
  for (const char letter : config.String(kKey)) {
    switch (letter) {
      case 'M':
        types.emplace_back("mamba");
        break;
      case '*':
        types.emplace_back("attention");
        break;
      case '-':
        types.emplace_back("mlp");
        break;
      case 'E':
        types.emplace_back("moe");
        break;
      default:
        config.Fail(
            kKey, fmt::format("'{}' is none of M, *, - and E", Printable(std::string(1, letter))));
        return {};
    }
  }
  return types;
}

/// layer_types, or what stands for it; empty: nothing does.
std::vector<std::string> ReadLayerTypes(const Family& family, ModelConfig& config) {
  std::vector<std::string> types = config.StringsOrEmpty("layer_types");
  if (types.empty()) types = TypesOfPattern(config);
  if (!types.empty() || !family.one_block) return types;
  return {"linear_attention", "moe", "full_attention", "mlp"};
}

/// Reads the mixer of each layer of a family with two, from layer_types, and in families whose
/// layers have one block each which one it is. Errors: kUnsupported naming a type.
Status ReadMixers(const Family& family, ModelConfig& config, Dimensions* d) {
  if (family.linear_mixer == family.mixer) return {};
  ParametersOf(family.linear_mixer).ReadSizes(family, config, d);
  std::vector<std::string> types = ReadLayerTypes(family, config);
  if (types.empty()) types = UsualLayerTypes(family, config, *d);
  MARLIN_RETURN_IF_ERROR(config.status());
  if (static_cast<int64_t>(types.size()) != d->layers) {
    config.Fail("layer_types", fmt::format("{} entries for {} layers", types.size(), d->layers));
    return config.status();
  }
  for (int64_t layer = 0; layer < d->layers; ++layer) {
    const std::string& type = types[static_cast<size_t>(layer)];
    const auto* const found =
        std::find_if(std::begin(kLayerTypes), std::end(kLayerTypes), [&](const LayerType& known) {
          return known.linear_mixer == family.linear_mixer && known.name == type &&
                 (family.one_block || !known.mlp);
        });
    if (found == std::end(kLayerTypes)) {
      return Status(Code::kUnsupported, fmt::format("{}: layer_types: '{}' is not supported",
                                                    config.file(), Printable(type)));
    }
    d->mixers.push_back(found->linear ? family.linear_mixer : family.mixer);
    if (!family.one_block) continue;
    d->blocks.push_back(found->mlp ? LayerBlocks::kMlp : LayerBlocks::kMixer);
    if (!found->experts) d->dense_layers.push_back(layer);
  }
  return {};
}

/// The number of layers, which layer_types has where layers have one block each.
int64_t ReadLayerCount(const Family& family, ModelConfig& config) {
  if (!family.one_block) return config.Size("num_hidden_layers", kMaxLayers);
  const int64_t layers = std::ssize(ReadLayerTypes(family, config));
  if (layers > kMaxLayers) config.Fail("layer_types", fmt::format("{} layers", layers));
  return std::clamp<int64_t>(layers, 1, kMaxLayers);
}

/// The width of MLPs that block_auto_adjust_ff_dim makes of intermediate_size.
void AdjustIntermediate(ModelConfig& config, Dimensions* d) {
  if (!config.Bool("block_auto_adjust_ff_dim", false)) return;
  const auto scaled = [](double value) { return static_cast<int64_t>(value); };
  int64_t width = scaled(2 * static_cast<double>(d->intermediate) / 3);
  if (config.Has("block_ffn_dim_multiplier")) {
    const double factor = config.Real("block_ffn_dim_multiplier", 1e-3, 1e3);
    const int64_t multiple = config.Size("block_multiple_of", kMaxWidth);
    width = scaled(factor * static_cast<double>(width));
    width = (width + multiple - 1) / multiple * multiple;
  }
  if (width < 1 || width > kMaxWidth) {
    config.Fail("block_ffn_dim_multiplier", fmt::format("makes an MLP {} wide", width));
  }
  d->intermediate = std::clamp<int64_t>(width, 1, kMaxWidth);
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

namespace {

/// Whether some layer has an MLP without experts.
bool HasDenseMlp(const Family& family, const Dimensions& dimensions) {
  for (int64_t layer = 0; layer < dimensions.layers; ++layer) {
    if (HasMlp(dimensions, layer) && !IsSparse(family, dimensions, layer)) return true;
  }
  return false;
}

}  // namespace

Result<Dimensions> ReadDimensions(const Family& family, ModelConfig& config) {
  Dimensions d;
  d.hidden = config.Size("hidden_size", kMaxWidth);
  d.layers = ReadLayerCount(family, config);
  d.vocabulary = config.Size("vocab_size", kMaxVocabulary);
  // Types whose layers all have experts do not know the key.
  if (config.Knows(family.mlp_width_key) || family.experts == nullptr) {
    d.intermediate = config.Size(family.mlp_width_key, kMaxWidth);
  }
  AdjustIntermediate(config, &d);
  d.mlp_bias = family.mlp_bias && config.Bool("mlp_bias", false);
  d.tied = config.Bool("tie_word_embeddings", false);
  ReadLayerEmbeddings(config, &d);
  ParametersOf(family.mixer).ReadSizes(family, config, &d);
  MARLIN_RETURN_IF_ERROR(ReadMixers(family, config, &d));
  ReadExperts(family, config, &d);
  if (d.intermediate == 0 && config.status().ok() && HasDenseMlp(family, d)) {
    d.intermediate = config.Size(family.mlp_width_key, kMaxWidth);
  }
  if (config.Knows("num_nextn_predict_layers")) {
    d.prediction_layers = config.CountOr("num_nextn_predict_layers", 16, 0);
  }
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
  const bool listed = layer < std::ssize(mixers);
  return listed ? mixers[static_cast<size_t>(layer)] : family.mixer;
}

Dimensions DimensionsOfLayer(const Dimensions& dimensions, int64_t layer) {
  Dimensions own = dimensions;
  // Lists of layers are the model's: one in every layer would be as many squared.
  for (auto* const list : {&own.dense_layers, &own.global_layers, &own.unindexed_layers}) {
    *list = std::vector<int64_t>();
  }
  own.mixers = std::vector<MixerKind>();
  own.blocks = std::vector<LayerBlocks>();
  own.layer_heads = std::vector<LayerHeads>();
  const std::vector<int64_t>& unindexed = dimensions.unindexed_layers;
  if (std::find(unindexed.begin(), unindexed.end(), layer) != unindexed.end()) own.index_dim = 0;
  if (layer >= std::ssize(dimensions.layer_heads)) return own;
  const LayerHeads& heads = dimensions.layer_heads[static_cast<size_t>(layer)];
  own.head_dim = heads.head_dim;
  own.kv_heads = heads.kv_heads;
  own.keys_are_values = heads.keys_are_values;
  own.kv_source = heads.kv_source;
  if (own.kv_source >= 0 && own.wide_readers) own.intermediate *= 2;
  return own;
}

bool HasMixer(const Dimensions& dimensions, int64_t layer) {
  const std::vector<LayerBlocks>& blocks = dimensions.blocks;
  return layer >= std::ssize(blocks) || blocks[static_cast<size_t>(layer)] != LayerBlocks::kMlp;
}

bool HasMlp(const Dimensions& dimensions, int64_t layer) {
  const std::vector<LayerBlocks>& blocks = dimensions.blocks;
  return layer >= std::ssize(blocks) || blocks[static_cast<size_t>(layer)] != LayerBlocks::kMixer;
}

bool IsSparse(const Family& family, const Dimensions& dimensions, int64_t layer) {
  if (family.experts == nullptr || dimensions.experts == 0) return false;
  if (layer >= dimensions.layers) return true;  // Those that predict further tokens.
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
