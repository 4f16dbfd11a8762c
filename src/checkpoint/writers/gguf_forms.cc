#include "checkpoint/writers/gguf_forms.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/readers/gguf/gguf_keys.h"

namespace marlin {
namespace {

/// The runtime of these files leaves out RoPE in every fourth layer of types that read this key.
void CheckRotatedLayers(ModelConfig& config) {
  if (!config.Knows("no_rope_layer_interval")) return;
  constexpr int64_t kInterval = 4;
  const std::vector<int64_t> rotated = config.IntegersOrEmpty("no_rope_layers");
  bool usual = !rotated.empty() ||
               config.SizeOr("no_rope_layer_interval", kMostGgufCount, kInterval) == kInterval;
  for (size_t i = 0; i < rotated.size(); ++i) {
    usual = usual && (rotated[i] != 0) == ((i + 1) % kInterval != 0);
  }
  if (!usual) {
    config.Fail("no_rope_layers", "gguf has no form for others than every fourth layer");
  }
}

void CheckGptOss(ModelConfig& config) {
  constexpr double kLimit = 7.0;
  constexpr double kAlpha = 1.702;
  if (config.Real("swiglu_limit", 0, kMostGgufReal) != kLimit) {
    config.Fail("swiglu_limit", "gguf has no form for another limit than 7");
  }
  if (config.Real("swiglu_alpha", 0, kMostGgufReal) != kAlpha) {
    config.Fail("swiglu_alpha", "gguf has no form for another factor than 1.702");
  }
  const std::vector<std::string> types = config.StringsOrEmpty("layer_types");
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] == (i % 2 == 0 ? "sliding_attention" : "full_attention")) continue;
    config.Fail("layer_types",
                "gguf has no form for layers that do not alternate between sliding_attention and "
                "full_attention");
  }
}

/// The runtime of these files has one size for a gated delta net's keys and values.
void CheckDeltaNets(ModelConfig& config, const Dimensions& dimensions) {
  if (dimensions.delta_value_dim == dimensions.delta_key_dim) return;
  config.Fail("linear_value_head_dim",
              fmt::format("gguf has no form for another than linear_key_head_dim {}",
                          dimensions.delta_key_dim));
}

/// Facts that the runtime of these files takes for granted in models of an architecture.
struct GgufForm {
  std::string_view architecture;
  bool head = false;        ///< The head has a matrix of its own.
  bool tied = false;        ///< It has not.
  bool square = false;      ///< The heads of queries are as wide together as the hidden states.
  bool each_head = false;   ///< There are as many heads of keys and values as of queries.
  bool normalizes = false;  ///< The weights of the chosen experts are normalized.
  bool sums = false;        ///< They are not.
  bool windows = false;     ///< Layers may have sliding windows.
};
constexpr GgufForm kForms[] = {
    {.architecture = "qwen3next", .normalizes = true},
    {.architecture = "qwen35"},
    {.architecture = "qwen35moe"},
    {.architecture = "minimax-m2", .head = true},
    {.architecture = "exaone4", .square = true, .windows = true},
    {.architecture = "cohere2", .tied = true, .square = true, .windows = true},
    {.architecture = "ernie4_5"},
    {.architecture = "ernie4_5-moe"},
    {.architecture = "hunyuan-dense"},
    {.architecture = "hunyuan-moe"},
    {.architecture = "dots1", .head = true, .each_head = true},
    {.architecture = "olmoe", .head = true, .square = true, .each_head = true, .sums = true},
    {.architecture = "chatglm", .square = true},
};

void CheckForm(const GgufForm& form, const Dimensions& d, ModelConfig& config) {
  const auto refuse = [&](std::string_view key, std::string_view what) {
    config.Fail(key, fmt::format("gguf has no form for {} in a model of the architecture {}", what,
                                 form.architecture));
  };
  if (form.head && d.tied) refuse("tie_word_embeddings", "a head without a matrix");
  if (form.tied && !d.tied) refuse("tie_word_embeddings", "a head with a matrix of its own");
  if (form.square && d.heads * d.head_dim != d.hidden) {
    refuse("head_dim", "heads that are not as wide together as hidden_size");
  }
  if (form.each_head && d.kv_heads != d.heads) {
    refuse("num_key_value_heads", "another number than num_attention_heads");
  }
  if (d.o_bias) refuse("attention_bias", "a bias after attention");
  const bool normalizes = config.Bool("norm_topk_prob", false);
  if (form.sums && normalizes) refuse("norm_topk_prob", "normalized weights of experts");
  if (form.normalizes && !normalizes) refuse("norm_topk_prob", "weights that are not normalized");
  if (!form.windows && config.Has("sliding_window") && config.Has("max_window_layers") &&
      !config.Knows("use_sliding_window")) {
    const std::vector<std::string> types = config.StringsOrEmpty("layer_types");
    const bool slides = std::find(types.begin(), types.end(), "sliding_attention") != types.end();
    if (slides ||
        (types.empty() && config.CountOr("max_window_layers", kMostGgufCount, 0) < d.layers)) {
      refuse("sliding_window", "windows");
    }
  }
}

/// Layers without experts come first.
void CheckSparseLayers(const Family& family, const Dimensions& d, const GgufForm* form,
                       ModelConfig& config) {
  if (family.experts == nullptr || (form == nullptr && family.sparse != SparseRule::kAfterFirst)) {
    return;
  }
  bool sparse = family.sparse == SparseRule::kByStep;
  for (int64_t layer = 0; layer < d.layers; ++layer) {
    const bool own = IsSparse(family, d, layer);
    if (sparse && !own) {
      return config.Fail(
          "num_hidden_layers",
          fmt::format("gguf has no form for layer {} without experts after one with experts",
                      layer));
    }
    sparse = sparse || own;
  }
}

void CheckExaone(const Dimensions& d, ModelConfig& config) {
  if (config.Has("sliding_window") == (d.layers == kGgufWindowedExaone)) return;
  config.Fail("sliding_window",
              fmt::format("gguf has windows in models of {} layers alone", kGgufWindowedExaone));
}

/// The runtime of these files divides by at least this.
void CheckLeastSum(ModelConfig& config) {
  constexpr double kLeast = 6.103515625e-05;
  if (config.Has("moe_norm_min") && config.Real("moe_norm_min", 0, kMostGgufReal) > kLeast) {
    config.Fail("moe_norm_min", fmt::format("gguf has no form for more than {}", kLeast));
  }
}

}  // namespace

std::vector<bool> GgufWindowedLayers(ModelConfig& config, const Dimensions& dimensions) {
  if (!config.Knows("sliding_window_pattern")) return {};
  constexpr int64_t kPattern = 4;
  std::vector<bool> windowed(static_cast<size_t>(dimensions.layers));
  if (!config.Has("sliding_window")) return windowed;
  const std::vector<std::string> types = config.StringsOrEmpty("layer_types");
  if (!types.empty()) {
    for (size_t i = 0; i < std::min(types.size(), windowed.size()); ++i) {
      windowed[i] = types[i] == "sliding_attention";
    }
    return windowed;
  }
  const auto pattern =
      static_cast<size_t>(config.SizeOr("sliding_window_pattern", kMostGgufCount, kPattern));
  for (size_t i = 0; i < windowed.size(); ++i) windowed[i] = (i + 1) % pattern != 0;
  return windowed;
}

void CheckGgufForm(TypedConfig& typed, const Dimensions& dimensions, const GgufNaming& naming) {
  ModelConfig& config = typed.config;
  const std::string_view type = typed.family->model_type;
  CheckRotatedLayers(config);
  CheckDeltaNets(config, dimensions);
  const std::string activation = config.StringOr("hidden_act", "silu");
  if (naming.type != "gpt_oss" && activation != "silu" && activation != "swish") {
    config.Fail("hidden_act", "gguf has no form for another than silu");
  }
  if (config.Bool("use_sliding_window", false)) {
    config.Fail("use_sliding_window", fmt::format("gguf has no form for windows of a {}", type));
  }
  const auto* const form = std::find_if(
      std::begin(kForms), std::end(kForms),
      [&](const GgufForm& row) { return row.architecture == naming.architecture->name; });
  const GgufForm* const known = form == std::end(kForms) ? nullptr : form;
  if (known != nullptr) CheckForm(*known, dimensions, config);
  CheckSparseLayers(*typed.family, dimensions, known, config);
  CheckLeastSum(config);
  if (naming.type == "exaone4") CheckExaone(dimensions, config);
  if (typed.family->router == RouterRule::kSoftmaxByMethod &&
      config.StringOr("topk_method", "greedy") != "greedy" &&
      config.CountOr("n_group", kMostGgufCount, 1) > 1) {
    config.Fail("topk_method", "gguf has no form for groups that their best expert stands for");
  }
  if (naming.type == "gpt_oss") CheckGptOss(config);
  if (config.Knows("rope_interleave") && !config.Bool("rope_interleave", false)) {
    config.Fail("rope_interleave", "gguf has no form for RoPE that rotates halves");
  }
}

}  // namespace marlin
