#include "model/decoder_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "base/printable.h"
#include "base/scalars.h"
#include "marlin/model.h"
#include "recipe/decoder_tensors.h"
#include "recipe/mixer.h"
#include "recipe/rope_parameters.h"
#include "recipe/text_config.h"
#include "recipe/typed_config.h"

namespace marlin {
namespace {

constexpr int64_t kMaxPositions = int64_t{1} << 30;

/// Errors: kUnsupported for a type that cannot be run, whether known or not.
Status CheckType(ModelConfig& config) {
  const std::string whole = config.String("model_type");
  MARLIN_RETURN_IF_ERROR(config.status());
  const std::string type = TextModelType(config.values());
  const Result<const Family*> family = FindFamily(type);
  if (family.ok()) return {};
  return Status(Code::kUnsupported,
                fmt::format("config.json: {}model_type '{}' cannot be run; supported: {}",
                            IsMultimodalType(whole) ? "text_config: " : "", Printable(type),
                            fmt::join(SupportedModelTypes(), ", ")));
}

Result<Activation> ReadActivation(const Family& family, ModelConfig& config) {
  std::string_view key = config.Knows("hidden_activation") ? "hidden_activation" : "hidden_act";
  if (family.mlp->gate.empty()) {
    key = config.Knows("mlp_hidden_act") ? "mlp_hidden_act" : "hidden_act";
    const std::string name = config.String(key);
    // Up is its own gate.
    if (name == "relu2") return Activation::kRelu;
    return Status(Code::kUnsupported,
                  fmt::format("config.json: {} '{}' is not supported; supported: relu2", key,
                              Printable(name)));
  }
  const std::string name = config.StringOr(key, "silu");
  if (name == "silu" || name == "swish") return Activation::kSilu;
  if (name == "gelu_pytorch_tanh" || name == "gelu_new") return Activation::kGeluTanh;
  if (name == "gelu" && family.gelu_is_tanh) return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  return Status(Code::kUnsupported,
                fmt::format("config.json: {} '{}' is not supported; supported: silu, "
                            "gelu_pytorch_tanh, relu",
                            key, Printable(name)));
}

/// Whether a layer has a sliding window when layer_types is absent. `limit` is max_window_layers,
/// or sliding_window_pattern for kByPattern.
bool SlidesByDefault(const DecoderConfig& decoder, int64_t layer, int64_t limit) {
  const std::vector<int64_t>& global = decoder.shape.global_layers;
  switch (decoder.family->windows) {
    case WindowRule::kAllLayers:
      return true;
    case WindowRule::kEvenLayers:
      return layer % 2 == 0;
    case WindowRule::kEvenBelowLimit:
      return layer % 2 == 0 && layer < limit;
    case WindowRule::kFromLimit:
      return layer >= limit;
    case WindowRule::kWithoutRotary:
      return decoder.layer(layer).rotary == kNoRotary;
    case WindowRule::kByPattern:
      return (layer + 1) % limit != 0;
    case WindowRule::kAfterFirst:
      return layer % 4 != 0;
    case WindowRule::kWithRotary:
      return decoder.layer(layer).rotary != kNoRotary;
    case WindowRule::kNone:
      return false;
    case WindowRule::kNotGlobal:
      return std::find(global.begin(), global.end(), layer) == global.end();
  }
  return true;
}

/// The sliding window of the layers that have one; 0: none has.
int64_t Window(const Family& family, ModelConfig& config) {
  const std::string_view key = family.chunks ? "attention_chunk_size" : "sliding_window";
  if (!config.Has(key)) return 0;
  if (config.Knows("use_sliding_window") && !config.Bool("use_sliding_window", false)) return 0;
  return config.Size(key, kMaxPositions);
}

/// Reads which layers have a sliding window: from layer_types, otherwise by the family's rule.
Status ReadWindows(ModelConfig& config, DecoderConfig* decoder) {
  // The family has read what layer_types says of mixers; none of these has a window.
  if (decoder->family->linear_mixer != decoder->family->mixer) return {};
  const int64_t layers = decoder->shape.layers;
  const Family& family = *decoder->family;
  const int64_t window = Window(family, config);
  const std::string_view sliding = family.chunks ? "chunked_attention" : "sliding_attention";
  const std::vector<std::string> types = config.StringsOrEmpty("layer_types");
  if (!types.empty() && static_cast<int64_t>(types.size()) != layers) {
    config.Fail("layer_types", fmt::format("{} entries for {} layers", types.size(), layers));
  }
  const bool by_pattern = types.empty() && family.windows == WindowRule::kByPattern;
  const int64_t limit = by_pattern ? config.SizeOr("sliding_window_pattern", kMaxPositions, 4)
                                   : config.CountOr("max_window_layers", kMaxPositions, 0);
  for (int64_t layer = 0; layer < layers && config.status().ok(); ++layer) {
    const auto at = static_cast<size_t>(layer);
    const bool slides =
        types.empty() ? SlidesByDefault(*decoder, layer, limit) : types[at] == sliding;
    if (!types.empty()) {
      const bool indexed = decoder->shape.index_tokens > 0 && types[at] == "indexed_attention";
      if (!slides && !indexed && types[at] != "full_attention") {
        return Status(
            Code::kUnsupported,
            fmt::format("config.json: layer_types: '{}' is not supported", Printable(types[at])));
      }
      if (slides && window == 0) {
        config.Fail("layer_types", fmt::format("{}, but no {} is in use", sliding,
                                               family.chunks ? "chunk size" : "sliding_window"));
      }
    }
    if (!slides) continue;
    decoder->layers[at].window = window;
    decoder->layers[at].chunked = family.chunks;
  }
  return {};
}

/// An indexer selects every token of a context of up to index_topk tokens, so that attention to all
/// of them is exact; it is not run.
void LimitToIndex(DecoderConfig* decoder) {
  const int64_t most = decoder->shape.index_tokens;
  if (most == 0 || decoder->max_positions <= most) return;
  decoder->notes.push_back(
      fmt::format("config.json: index_topk: the context is limited from {} to {} tokens, of which "
                  "sparse attention would select all",
                  decoder->max_positions, most));
  decoder->max_positions = most;
}

/// Errors: kMalformedFile for factors of RoPE that are not one for every pair.
Status AddRotary(const RopeParameters& rope, int64_t head_dim, DecoderConfig* decoder) {
  if (rope.type == RopeType::kLongRope) {
    const int64_t pairs = RotatedPairs(rope, head_dim);
    if (std::ssize(rope.pair_factors) != pairs) {
      return Status(Code::kMalformedFile,
                    fmt::format("config.json: short_factor: {} entries for {} pairs",
                                rope.pair_factors.size(), pairs));
    }
    if (rope.limited) {
      decoder->notes.push_back(
          fmt::format("config.json: long_factor: not used; the context is the {} tokens that "
                      "short_factor is for",
                      rope.positions));
    }
  }
  decoder->rotaries.push_back(MakeRotary(rope, head_dim));
  return {};
}

/// The entries of no_rope_layers: 0 for a layer that does not rotate.
std::vector<int64_t> NoRopeLayers(ModelConfig& config, int64_t layers) {
  std::vector<int64_t> rotates = config.IntegersOrEmpty("no_rope_layers");
  const int64_t interval = config.Size("no_rope_layer_interval", kMaxPositions);
  if (rotates.empty()) {
    for (int64_t layer = 0; layer < layers; ++layer) {
      rotates.push_back((layer + 1) % interval != 0 ? 1 : 0);
    }
  } else if (std::ssize(rotates) < layers) {
    config.Fail("no_rope_layers", fmt::format("{} entries for {} layers", rotates.size(), layers));
    rotates.resize(static_cast<size_t>(layers));
  }
  return rotates;
}

/// Reads which layers rotate, and which have a sliding window: one may follow from the other.
Status ReadRotaryAndWindows(ModelConfig& config, DecoderConfig* decoder) {
  const RotaryRule rule = decoder->family->rotary;
  std::vector<LayerConfig>& layers = decoder->layers;
  if (rule == RotaryRule::kByNoRopeLayers) {
    const std::vector<int64_t> rotates = NoRopeLayers(config, std::ssize(layers));
    for (size_t i = 0; i < layers.size(); ++i) {
      if (rotates[i] == 0) layers[i].rotary = kNoRotary;
    }
  }
  if (rule == RotaryRule::kByPositionType || rule == RotaryRule::kNone) {
    const bool reads = rule == RotaryRule::kByPositionType;
    const std::string type = reads ? config.StringOr("position_embedding_type", "nope") : "nope";
    if (type != "rope" && type != "nope") {
      config.Fail("position_embedding_type",
                  fmt::format("'{}' is neither rope nor nope", Printable(type)));
    }
    for (LayerConfig& layer : layers) {
      if (type != "rope") layer.rotary = kNoRotary;
    }
  }
  MARLIN_RETURN_IF_ERROR(ReadWindows(config, decoder));
  const bool all = rule == RotaryRule::kSlidingOrAll && Window(*decoder->family, config) == 0;
  if ((rule != RotaryRule::kSliding && rule != RotaryRule::kSlidingOrAll) || all) return {};
  for (LayerConfig& layer : layers) {
    if (layer.window == 0) layer.rotary = kNoRotary;
  }
  return {};
}

/// Gives the layers with a window the RoPE of their kind, if it is another one.
Status ReadSlidingRotary(TypedConfig& typed, const RopeParameters& full, DecoderConfig* decoder) {
  if (!typed.config.Knows("layer_types")) return {};
  MARLIN_ASSIGN_OR_RETURN(const RopeParameters rope,
                          ReadRopeParameters(typed, RopeKind::kSlidingAttention));
  const MixerParameters& mixer = ParametersOf(decoder->family->mixer);
  for (LayerConfig& layer : decoder->layers) {
    if (layer.window == 0 || layer.rotary == kNoRotary) continue;
    const int64_t dim = mixer.RotaryDim(layer.sizes);
    if (decoder->rotaries.size() == 1) {
      if (rope == full && dim == mixer.RotaryDim(decoder->GlobalSizes())) return {};
      MARLIN_RETURN_IF_ERROR(AddRotary(rope, dim, decoder));
      decoder->max_positions = std::min(decoder->max_positions, rope.positions);
    }
    layer.rotary = 1;
  }
  return {};
}

/// The factors of queries in layers that do not rotate, by their position.
void ReadTemperature(ModelConfig& config, DecoderConfig* decoder) {
  constexpr std::string_view kKey = "attn_temperature_tuning";
  if (!config.Knows(kKey)) return;
  // Older files have a number.
  const Json& given = config.values().at(std::string(kKey));
  const bool tunes = given.is_number() ? given != 0 : config.Bool(kKey, false);
  const PositionScale scale = {static_cast<float>(config.Real("attn_scale", 0, 1e6)), 1,
                               config.Size("floor_scale", kMaxPositions)};
  for (LayerConfig& layer : decoder->layers) {
    if (tunes && layer.rotary == kNoRotary) layer.query_scale = scale;
  }
}

void AddLayers(DecoderConfig* decoder) {
  for (int64_t index = 0; index < decoder->shape.layers; ++index) {
    LayerConfig& layer = decoder->layers.emplace_back();
    layer.mixes = HasMixer(decoder->shape, index);
    layer.mixer = MixerOfLayer(*decoder->family, decoder->shape, index);
    layer.sizes = DimensionsOfLayer(decoder->shape, index);
    const float rotary = decoder->rotary(index)->score_factor;
    layer.score_scale = ParametersOf(layer.mixer).ScoreScale(layer.sizes, rotary);
  }
}

/// Routing that is limited to groups of experts, of the best two of each or the best one.
void ReadGroups(ModelConfig& config, int64_t best_of_group, DecoderConfig* decoder) {
  RouterOptions& router = decoder->router;
  router.best_of_group = best_of_group;
  router.groups = config.SizeOr("n_group", 1 << 14, 1);
  router.top_groups = config.SizeOr("topk_group", 1 << 14, 1);
  if (decoder->shape.experts % router.groups != 0) {
    config.Fail("n_group", fmt::format("{} experts are not {} groups of equal size",
                                       decoder->shape.experts, router.groups));
  }
  if (router.top_groups > router.groups) {
    config.Fail("topk_group", fmt::format("{} of {} groups", router.top_groups, router.groups));
  }
  if (const int64_t left = decoder->shape.experts / router.groups * router.top_groups;
      decoder->shape.top_k > left) {
    config.Fail("num_experts_per_tok", fmt::format("{} experts of the {} in {} groups",
                                                   decoder->shape.top_k, left, router.top_groups));
  }
}

float RouterScale(ModelConfig& config) {
  return static_cast<float>(config.Real("routed_scaling_factor", -1e6, 1e6));
}

void ReadTopkMethod(ModelConfig& config, DecoderConfig* decoder) {
  const std::string method = config.StringOr("topk_method", "greedy");
  if (method == "group_limited_greedy") {
    ReadGroups(config, /*best_of_group=*/1, decoder);
  } else if (method != "greedy") {
    config.Fail("topk_method",
                fmt::format("'{}' is neither greedy nor group_limited_greedy", Printable(method)));
  }
}

/// Factors; a type without a key has 1, or for scores the mixer's own.
void ReadScales(ModelConfig& config, DecoderConfig* decoder) {
  constexpr double kLeast = 1e-6;
  constexpr double kMost = 1e6;
  const auto read = [&](std::string_view key) { return config.RealOr(key, kLeast, kMost, 1); };
  decoder->embedding_scale = static_cast<float>(read("embedding_multiplier"));
  decoder->residual_scale = static_cast<float>(read("residual_multiplier"));
  decoder->logit_scale = static_cast<float>(read("logit_scale") / read("logits_scaling"));
  if (!config.Has("attention_multiplier")) return;
  const auto scores = static_cast<float>(config.Real("attention_multiplier", kLeast, kMost));
  for (LayerConfig& layer : decoder->layers) layer.score_scale = scores;
}

/// Reads the caps of scores and logits, and a factor of embeddings that the sizes determine.
/// `stored`: the config as written.
void ReadCaps(ModelConfig& config, ModelConfig& stored, DecoderConfig* decoder) {
  constexpr double kLeast = 1e-6;
  constexpr double kMost = 1e6;
  const auto cap = [&](std::string_view key) {
    return config.Has(key) ? static_cast<float>(config.Real(key, kLeast, kMost)) : 0.0F;
  };
  decoder->score_softcap = cap("attn_logit_softcapping");
  decoder->logit_softcap = cap("final_logit_softcapping");
  if (!decoder->family->scales_embedding) return;
  // transformers rounds the factors to the type of the model.
  const std::string type = stored.StringOr("dtype", stored.StringOr("torch_dtype", ""));
  const auto root = [&](int64_t features) {
    const float scale = std::sqrt(static_cast<float>(features));
    if (type == "bfloat16") return Bf16ToFloat(FloatToBf16(scale));
    return type == "float16" ? HalfToFloat(FloatToHalf(scale)) : scale;
  };
  decoder->embedding_scale = root(decoder->shape.hidden);
  decoder->layer_embedding_scale = kLayerEmbeddingFactor * root(decoder->shape.layer_features);
}

void ReadRouter(ModelConfig& config, DecoderConfig* decoder) {
  const Family& family = *decoder->family;
  if (family.experts == nullptr) return;
  RouterOptions& router = decoder->router;
  router.top_k = decoder->shape.top_k;
  switch (family.router) {
    case RouterRule::kSoftmax:
      router.normalize = config.Bool("norm_topk_prob", false);
      return;
    case RouterRule::kSoftmaxNormalized:
      router.normalize = true;
      return;
    case RouterRule::kSoftmaxOfChosen:
      router.scoring = RouterOptions::Scoring::kSoftmaxOfChosen;
      return;
    case RouterRule::kSigmoid:
      router.scoring = RouterOptions::Scoring::kSigmoid;
      router.normalize = config.Bool("norm_topk_prob", false);
      router.scaling_factor = RouterScale(config);
      ReadGroups(config, /*best_of_group=*/2, decoder);
      return;
    case RouterRule::kSigmoidNormalized:
      router.scoring = RouterOptions::Scoring::kSigmoid;
      router.normalize = true;
      router.scaling_factor =
          static_cast<float>(config.RealOr("routed_scaling_factor", -1e6, 1e6, 1));
      return;
    case RouterRule::kSigmoidPlain:
      router.scoring = RouterOptions::Scoring::kSigmoid;
      router.normalize = false;
      return;
    case RouterRule::kSoftmaxCorrected:
      router.normalize = true;
      router.least_sum = static_cast<float>(config.Real("moe_norm_min", 0, 1));
      return;
    case RouterRule::kSoftmaxByMethod:
      router.normalize = false;
      router.scaling_factor = RouterScale(config);
      ReadTopkMethod(config, decoder);
      return;
    case RouterRule::kSoftmaxGrouped:
      router.normalize = config.Bool("norm_topk_prob", false);
      router.scaling_factor = RouterScale(config);
      ReadGroups(config, /*best_of_group=*/2, decoder);
  }
}

}  // namespace

DecoderConfig PredictionConfig(const DecoderConfig& model) {
  DecoderConfig config = model;
  LayerConfig layer;
  layer.mixer = model.family->mixer;
  layer.sizes = DimensionsOfLayer(model.shape, model.shape.layers);
  layer.score_scale =
      ParametersOf(layer.mixer).ScoreScale(layer.sizes, model.rotaries.front().score_factor);
  config.shape = layer.sizes;
  config.shape.layers = 1;
  config.shape.prediction_layers = 0;
  config.layers = {layer};
  return config;
}

std::vector<std::string> SupportedModelTypes() {
  std::vector<std::string> types;
  for (const Family& family : AllFamilies()) {
    if (!family.nested) types.emplace_back(family.model_type);
  }
  std::sort(types.begin(), types.end());
  return types;
}

Result<DecoderConfig> ReadDecoderConfig(std::string_view config_json,
                                        const GenerationFiles& files) {
  MARLIN_ASSIGN_OR_RETURN(ModelConfig source, ModelConfig::Parse(config_json));
  MARLIN_RETURN_IF_ERROR(CheckType(source));
  const bool multimodal = IsMultimodalType(source.String("model_type"));
  MARLIN_ASSIGN_OR_RETURN(TypedConfig typed,
                          ReadTypedConfig(std::move(source), UnknownKeys::kRefuse));
  ModelConfig& config = typed.config;
  DecoderConfig decoder;
  decoder.multimodal = multimodal;
  decoder.family = typed.family;
  MARLIN_ASSIGN_OR_RETURN(decoder.shape, ReadDimensions(*decoder.family, config));
  const Family& family = *decoder.family;
  decoder.epsilon =
      static_cast<float>(config.Real(family.layer_norms ? "layer_norm_eps" : "rms_norm_eps", 0, 1));
  if (family.clamps_gate) {
    decoder.gate_limit = static_cast<float>(config.Real("swiglu_limit", 0, 1e6));
    decoder.gate_alpha = static_cast<float>(config.Real("swiglu_alpha", -1e6, 1e6));
  } else {
    MARLIN_ASSIGN_OR_RETURN(decoder.activation, ReadActivation(family, config));
  }
  MARLIN_ASSIGN_OR_RETURN(const RopeParameters rope,
                          ReadRopeParameters(typed, RopeKind::kFullAttention));
  decoder.max_positions = rope.positions;
  LimitToIndex(&decoder);
  const MixerParameters& mixer = ParametersOf(family.mixer);
  MARLIN_RETURN_IF_ERROR(AddRotary(rope, mixer.RotaryDim(decoder.GlobalSizes()), &decoder));
  decoder.interleaved_rotary = family.interleaved_rotary || mixer.InterleavesRotary(config);
  AddLayers(&decoder);
  ReadScales(config, &decoder);
  ReadCaps(config, typed.source, &decoder);
  if (rope.query_beta != 0) {
    for (LayerConfig& layer : decoder.layers) {
      layer.query_scale = {static_cast<float>(rope.query_beta), 0,
                           static_cast<int64_t>(rope.original_context)};
    }
  }
  MARLIN_RETURN_IF_ERROR(ReadRotaryAndWindows(config, &decoder));
  MARLIN_RETURN_IF_ERROR(ReadSlidingRotary(typed, rope, &decoder));
  ReadTemperature(config, &decoder);
  ReadRouter(config, &decoder);
  MARLIN_ASSIGN_OR_RETURN(decoder.generation, ReadGenerationDefaults(typed.source, files));
  MARLIN_RETURN_IF_ERROR(config.status());
  if (!typed.ignored.empty()) {
    decoder.notes.push_back(
        fmt::format("config.json: ignored, as they are unknown and seem to change no results: {}",
                    fmt::join(typed.ignored, ", ")));
  }
  return decoder;
}

}  // namespace marlin
