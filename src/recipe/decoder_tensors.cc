#include "recipe/decoder_tensors.h"

#include <fmt/core.h>

#include "recipe/mixer.h"

namespace marlin {
namespace {

class LayerDescriber {
 public:
  LayerDescriber(const Family& family, const Dimensions& dimensions, int64_t layer,
                 const ExpertStyle& style)
      : family_(family), d_(dimensions), layer_(layer), names_(layer), style_(style) {}

  LayerTensors Describe(bool sparse) const {
    LayerTensors layer;
    layer.input_norm = names_.Vector("input_layernorm.weight", d_.hidden);
    layer.mixer = ParametersOf(MixerOfLayer(family_, d_, layer_))
                      .Tensors(family_, DimensionsOfLayer(d_, layer_), names_);
    layer.mlp_norm = names_.Vector("post_attention_layernorm.weight", d_.hidden);
    if (family_.sandwich_norms) {
      layer.attention_out_norm = names_.Vector("post_self_attn_layernorm.weight", d_.hidden);
      layer.mlp_out_norm = names_.Vector("post_mlp_layernorm.weight", d_.hidden);
    }
    if (sparse) {
      layer.experts = Experts();
    } else {
      layer.mlp = Mlp("mlp", d_.intermediate, kUsualProjections);
    }
    return layer;
  }

 private:
  MlpTensors Mlp(const std::string& block, int64_t width, const ExpertProjections& names) const {
    const auto linear = [&](std::string_view name, int64_t in, int64_t out) {
      return names_.Linear(fmt::format("{}.{}", block, name), in, out, d_.mlp_bias);
    };
    MlpTensors mlp;
    if (family_.fused_gate_up) {
      mlp.gate_up = {linear(kFusedProjections[0], d_.hidden, 2 * width)};
    } else {
      mlp.gate_up = {linear(names[0], d_.hidden, width), linear(names[1], d_.hidden, width)};
    }
    mlp.down = linear(names[2], width, d_.hidden);
    return mlp;
  }

  ExpertStack Stack(std::string_view name, int64_t in, int64_t out) const {
    ExpertStack stack{
        fmt::format("{}{}.experts.{}", names_.prefix(), style_.block, name), in, out, {}};
    if (style_.biases) stack.bias_name = stack.name + "_bias";
    return stack;
  }

  ExpertsTensors Experts() const {
    const std::string block(style_.block);
    ExpertsTensors experts;
    experts.router = names_.Linear(fmt::format("{}.{}", block, style_.router), d_.hidden,
                                   d_.experts, style_.router_bias);
    if (!style_.correction_bias.empty()) {
      experts.correction_bias =
          names_.Vector(fmt::format("{}.{}", block, style_.correction_bias), d_.experts);
      experts.correction_bias.as_row = style_.correction_row;
    }
    if (style_.stacked) {
      experts.gate_up = Stack(kFusedProjections[0], d_.hidden, 2 * d_.expert_width);
      experts.down = Stack(kFusedProjections[1], d_.expert_width, d_.hidden);
    } else {
      for (int64_t e = 0; e < d_.experts; ++e) {
        experts.each.push_back(Mlp(fmt::format("{}.experts.{}", block, e), d_.expert_width,
                                   style_.short_names ? kShortProjections : kUsualProjections));
      }
    }
    if (d_.shared_width == 0) return experts;
    const bool gated = family_.shared == SharedExperts::kGated;
    experts.shared =
        Mlp(fmt::format("{}.{}", block, style_.shared), d_.shared_width, kUsualProjections);
    if (gated) experts.shared_gate = names_.Linear(block + ".shared_expert_gate", d_.hidden, 1);
    return experts;
  }

  const Family& family_;
  const Dimensions& d_;
  int64_t layer_;
  LayerNames names_;
  const ExpertStyle& style_;
};

}  // namespace

std::vector<LinearTensors> MixerTensors::Linears() const {
  std::vector<LinearTensors> all;
  for (const ProjectionTensors& projection : projections) {
    all.insert(all.end(), projection.layers.begin(), projection.layers.end());
  }
  if (out.present()) all.push_back(out);
  return all;
}

std::string LayerPrefix(int64_t layer) { return fmt::format("model.layers.{}.", layer); }

bool IsPredictionTensor(const Dimensions& dimensions, std::string_view name) {
  for (int64_t i = 0; i < dimensions.prediction_layers; ++i) {
    if (name.starts_with(LayerPrefix(dimensions.layers + i))) return true;
  }
  return false;
}

LayerTensors DescribeLayer(const Family& family, const Dimensions& dimensions, int64_t layer,
                           const ExpertStyle& style) {
  return LayerDescriber(family, dimensions, layer, style)
      .Describe(IsSparse(family, dimensions, layer));
}

ExpertStyle FindExpertStyle(const Family& family, int64_t layer,
                            FunctionRef<bool(const std::string&)> has) {
  ExpertStyle style = family.experts == nullptr ? ExpertStyle() : *family.experts;
  const std::string prefix = LayerPrefix(layer);
  // Checkpoints of Mixtral rename the block, the matrices or both, or stack all experts.
  for (const std::string_view block : kExpertBlocks) {
    if (has(fmt::format("{}{}.{}.weight", prefix, block, style.router))) style.block = block;
  }
  const std::string experts = fmt::format("{}{}.experts.", prefix, style.block);
  style.stacked = has(experts + std::string(kFusedProjections[0]));
  style.short_names = has(fmt::format("{}0.{}.weight", experts, kShortProjections[0]));
  return style;
}

}  // namespace marlin
