#include "model/decoder_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/macros.h"
#include "base/printable.h"
#include "marlin/model.h"

namespace marlin {
namespace {

constexpr int64_t kMaxPositions = int64_t{1} << 30;

constexpr std::array<std::string_view, 12> kSupported = {
    "deepseek_v3", "glm4",    "glm4_moe", "glm4_moe_lite", "gpt_oss", "llama",
    "mistral",     "mixtral", "qwen2",    "qwen2_moe",     "qwen3",   "qwen3_moe",
};

Result<const Family*> FindSupported(const std::string& model_type) {
  if (std::find(kSupported.begin(), kSupported.end(), model_type) == kSupported.end()) {
    return Status(Code::kUnsupported,
                  fmt::format("config.json: model_type '{}' cannot be run; supported: {}",
                              Printable(model_type), fmt::join(kSupported, ", ")));
  }
  return FindFamily(model_type);
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

/// Whether a layer of a family slides when layer_types is absent. `limit` is max_window_layers.
bool SlidesByDefault(const std::string& type, int64_t layer, int64_t limit) {
  if (type == "gpt_oss") return layer % 2 == 0;
  if (type == "qwen2_moe") return layer % 2 == 0 && layer < limit;
  if (type == "qwen2" || type == "qwen3") return layer >= limit;
  return true;
}

/// Which layers see only the last keys: as layer_types says, else as the family always did.
Status ReadWindows(ModelConfig& config, const std::string& type, DecoderConfig* decoder) {
  const int64_t layers = decoder->shape.layers;
  decoder->windows.assign(static_cast<size_t>(layers), 0);
  const int64_t window = config.CountOr("sliding_window", kMaxPositions, 0);
  const bool is_qwen = type.starts_with("qwen");
  if (window == 0 || (is_qwen && !config.Bool("use_sliding_window", false))) return {};
  const std::vector<std::string> types = config.StringsOrEmpty("layer_types");
  if (!types.empty() && static_cast<int64_t>(types.size()) != layers) {
    config.Fail("layer_types", fmt::format("{} entries for {} layers", types.size(), layers));
  }
  const int64_t limit = is_qwen ? config.CountOr("max_window_layers", kMaxPositions, 28) : 0;
  for (int64_t layer = 0; layer < layers && config.status().ok(); ++layer) {
    const auto at = static_cast<size_t>(layer);
    bool slides = SlidesByDefault(type, layer, limit);
    // qwen3_moe has no kinds of layers.
    if (!types.empty() && type != "qwen3_moe") {
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
  if (family.experts == ExpertLayout::kNone) return;
  RouterOptions& router = decoder->router;
  router.top_k = decoder->shape.top_k;
  if (family.correction_bias) {
    router.scoring = RouterOptions::Scoring::kSigmoid;
    router.normalize = config.Bool("norm_topk_prob", true);
    router.scaling_factor =
        static_cast<float>(config.RealOr("routed_scaling_factor", -1e6, 1e6, 1.0));
    router.groups = config.SizeOr("n_group", 1 << 14, 1);
    router.top_groups = config.SizeOr("topk_group", 1 << 14, 1);
  } else if (family.experts == ExpertLayout::kStacked) {
    router.scoring = RouterOptions::Scoring::kSoftmaxOfChosen;
  } else {
    // Mixtral always divides by the sum, Qwen when it says so.
    router.normalize =
        family.experts == ExpertLayout::kBlockSparse || config.Bool("norm_topk_prob", false);
  }
}

/// One id or a list of them.
std::vector<int32_t> EndTokens(ModelConfig& config) {
  std::vector<int32_t> ids;
  if (!config.Has("eos_token_id")) return ids;
  constexpr int64_t kMaxId = INT32_MAX;
  if (config.IsList("eos_token_id")) {
    for (const int64_t id : config.IntegersOrEmpty("eos_token_id")) {
      if (id >= 0 && id <= kMaxId) ids.push_back(static_cast<int32_t>(id));
    }
  } else {
    ids.push_back(static_cast<int32_t>(config.CountOr("eos_token_id", kMaxId, 0)));
  }
  return ids;
}

Status ReadEndTokens(ModelConfig& config, std::string_view generation_json,
                     DecoderConfig* decoder) {
  if (!generation_json.empty()) {
    MARLIN_ASSIGN_OR_RETURN(
        ModelConfig generation,
        ModelConfig::Parse(generation_json, "generation_config.json", kGenerationJson));
    decoder->eos_token_ids = EndTokens(generation);
    MARLIN_RETURN_IF_ERROR(generation.status());
  }
  if (decoder->eos_token_ids.empty()) decoder->eos_token_ids = EndTokens(config);
  return {};
}

}  // namespace

std::vector<std::string> SupportedModelTypes() { return {kSupported.begin(), kSupported.end()}; }

Result<DecoderConfig> ReadDecoderConfig(std::string_view config_json,
                                        std::string_view generation_json) {
  MARLIN_ASSIGN_OR_RETURN(ModelConfig config, ModelConfig::Parse(config_json));
  const std::string type = config.String("model_type");
  MARLIN_RETURN_IF_ERROR(config.status());
  DecoderConfig decoder;
  MARLIN_ASSIGN_OR_RETURN(decoder.family, FindSupported(type));
  MARLIN_ASSIGN_OR_RETURN(decoder.shape, ReadDimensions(*decoder.family, config));
  const int64_t default_positions = type == "gpt_oss" ? 131072 : 2048;
  decoder.max_positions =
      config.SizeOr("max_position_embeddings", kMaxPositions, default_positions);
  decoder.epsilon = static_cast<float>(config.RealOr("rms_norm_eps", 0, 1, 1e-6));
  MARLIN_ASSIGN_OR_RETURN(decoder.activation, ReadActivation(config));
  if (type == "gpt_oss") {
    decoder.gate_limit = static_cast<float>(config.RealOr("swiglu_limit", 0, 1e6, 7.0));
    decoder.gate_alpha = static_cast<float>(config.RealOr("swiglu_alpha", -1e6, 1e6, 1.702));
  }
  const int64_t turned = decoder.latent() ? decoder.shape.rope_dim : decoder.shape.head_dim;
  MARLIN_ASSIGN_OR_RETURN(decoder.rotary, ReadRotary(config, turned, decoder.max_positions));
  decoder.interleaved_rotary =
      type == "glm4" || (decoder.latent() && config.Bool("rope_interleave", true));
  decoder.score_scale = 1.0F / std::sqrt(static_cast<float>(decoder.key_dim()));
  if (decoder.latent()) decoder.score_scale *= decoder.rotary.score_factor;
  MARLIN_RETURN_IF_ERROR(ReadWindows(config, type, &decoder));
  ReadRouter(config, &decoder);
  MARLIN_RETURN_IF_ERROR(ReadEndTokens(config, generation_json, &decoder));
  MARLIN_RETURN_IF_ERROR(config.status());
  return decoder;
}

}  // namespace marlin
