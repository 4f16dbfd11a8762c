#include "model/decoder_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/macros.h"
#include "base/printable.h"
#include "marlin/model.h"

namespace marlin {
namespace {

constexpr int64_t kMaxPositions = int64_t{1} << 30;

Result<const Family*> FindSupported(const std::string& model_type) {
  Result<const Family*> family = FindFamily(model_type);
  if (family.ok() && (*family)->runs) return family;
  return Status(Code::kUnsupported,
                fmt::format("config.json: model_type '{}' cannot be run; supported: {}",
                            Printable(model_type), fmt::join(SupportedModelTypes(), ", ")));
}

Result<Activation> ReadActivation(ModelConfig& config) {
  const std::string name = config.StringOr("hidden_act", "silu");
  if (name == "silu" || name == "swish") return Activation::kSilu;
  if (name == "gelu_pytorch_tanh" || name == "gelu_new") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  return Status(Code::kUnsupported,
                fmt::format("config.json: hidden_act '{}' is not supported; supported: silu, "
                            "gelu_pytorch_tanh, relu",
                            Printable(name)));
}

/// Whether a layer has a sliding window when layer_types is absent. `limit` is max_window_layers.
bool SlidesByDefault(WindowRule rule, int64_t layer, int64_t limit) {
  switch (rule) {
    case WindowRule::kAllLayers:
      return true;
    case WindowRule::kEvenLayers:
      return layer % 2 == 0;
    case WindowRule::kEvenBelowLimit:
      return layer % 2 == 0 && layer < limit;
    case WindowRule::kFromLimit:
      return layer >= limit;
  }
  return true;
}

/// Reads which layers have a sliding window: from layer_types, else by the family's rule.
Status ReadWindows(ModelConfig& config, DecoderConfig* decoder) {
  const Family& family = *decoder->family;
  const int64_t layers = decoder->shape.layers;
  decoder->windows.assign(static_cast<size_t>(layers), 0);
  const int64_t window = config.CountOr("sliding_window", kMaxPositions, 0);
  const bool asks = family.asks_for_windows;
  if (window == 0 || (asks && !config.Bool("use_sliding_window", false))) return {};
  const std::vector<std::string> types = config.StringsOrEmpty("layer_types");
  if (!types.empty() && static_cast<int64_t>(types.size()) != layers) {
    config.Fail("layer_types", fmt::format("{} entries for {} layers", types.size(), layers));
  }
  const int64_t limit = asks ? config.CountOr("max_window_layers", kMaxPositions, 28) : 0;
  for (int64_t layer = 0; layer < layers && config.status().ok(); ++layer) {
    const auto at = static_cast<size_t>(layer);
    bool slides = SlidesByDefault(family.windows, layer, limit);
    if (!types.empty() && family.reads_layer_types) {
      slides = types[at] == "sliding_attention";
      if (!slides && types[at] != "full_attention") {
        return Status(
            Code::kUnsupported,
            fmt::format("config.json: layer_types: '{}' is not supported", Printable(types[at])));
      }
    }
    if (slides) decoder->windows[at] = window;
  }
  return {};
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
      router.normalize = config.Bool("norm_topk_prob", true);
      router.scaling_factor =
          static_cast<float>(config.RealOr("routed_scaling_factor", -1e6, 1e6, 1.0));
      router.groups = config.SizeOr("n_group", 1 << 14, 1);
      router.top_groups = config.SizeOr("topk_group", 1 << 14, 1);
  }
}

}  // namespace

std::vector<std::string> SupportedModelTypes() {
  std::vector<std::string> types;
  for (const Family& family : AllFamilies()) {
    if (family.runs) types.emplace_back(family.model_type);
  }
  std::sort(types.begin(), types.end());
  return types;
}

Result<DecoderConfig> ReadDecoderConfig(std::string_view config_json,
                                        const GenerationFiles& files) {
  MARLIN_ASSIGN_OR_RETURN(ModelConfig config, ModelConfig::Parse(config_json));
  const std::string type = config.String("model_type");
  MARLIN_RETURN_IF_ERROR(config.status());
  DecoderConfig decoder;
  MARLIN_ASSIGN_OR_RETURN(decoder.family, FindSupported(type));
  MARLIN_ASSIGN_OR_RETURN(decoder.shape, ReadDimensions(*decoder.family, config));
  const Family& family = *decoder.family;
  decoder.max_positions =
      config.SizeOr("max_position_embeddings", kMaxPositions, family.default_positions);
  decoder.epsilon = static_cast<float>(config.RealOr("rms_norm_eps", 0, 1, 1e-6));
  MARLIN_ASSIGN_OR_RETURN(decoder.activation, ReadActivation(config));
  if (family.gate_limit != 0) {
    decoder.gate_limit =
        static_cast<float>(config.RealOr("swiglu_limit", 0, 1e6, family.gate_limit));
    decoder.gate_alpha = static_cast<float>(config.RealOr("swiglu_alpha", -1e6, 1e6, 1.702));
  }
  const int64_t rotary_dim = decoder.latent() ? decoder.shape.rope_dim : decoder.shape.head_dim;
  MARLIN_ASSIGN_OR_RETURN(decoder.rotary, ReadRotary(config, rotary_dim, decoder.max_positions));
  decoder.interleaved_rotary =
      family.interleaved_rotary || (decoder.latent() && config.Bool("rope_interleave", true));
  decoder.score_scale = 1.0F / std::sqrt(static_cast<float>(decoder.key_dim()));
  if (decoder.latent()) decoder.score_scale *= decoder.rotary.score_factor;
  MARLIN_RETURN_IF_ERROR(ReadWindows(config, &decoder));
  ReadRouter(config, &decoder);
  MARLIN_ASSIGN_OR_RETURN(decoder.generation, ReadGenerationDefaults(config, files));
  MARLIN_RETURN_IF_ERROR(config.status());
  return decoder;
}

}  // namespace marlin
