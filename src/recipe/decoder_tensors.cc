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
    layer.input_norm = Norm(family_.norms->input);
    layer.mixer = ParametersOf(MixerOfLayer(family_, d_, layer_))
                      .Tensors(family_, DimensionsOfLayer(d_, layer_), names_);
    layer.mlp_norm = family_.parallel ? layer.input_norm : Norm(family_.norms->mlp);
    layer.attention_out_norm = Norm(family_.norms->attention_out);
    layer.mlp_out_norm = Norm(family_.norms->mlp_out);
    if (family_.layer_scalars) layer.scalar = names_.Vector("layer_scalar", 1);
    if (sparse) {
      layer.experts = Experts();
    } else {
      layer.mlp = Mlp(std::string(family_.mlp_block), d_.intermediate, kUsualProjections);
    }
    return layer;
  }

 private:
  VectorTensor Norm(std::string_view name) const { return names_.Norm(family_, name, d_.hidden); }

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
    ExpertStack stack{fmt::format("{}{}.{}", names_.prefix(), style_.block, name), in, out, {}};
    if (style_.biases) stack.bias_name = stack.name + "_bias";
    return stack;
  }

  std::string_view CorrectionBias() const {
    const bool usual = style_.correction_bias.empty() && family_.router == RouterRule::kSigmoid;
    return usual ? "gate.e_score_correction_bias" : style_.correction_bias;
  }

  ExpertsTensors Experts() const {
    const std::string block(style_.block);
    ExpertsTensors experts;
    experts.router = names_.Linear(fmt::format("{}.{}", block, style_.router), d_.hidden,
                                   d_.experts, style_.router_bias);
    if (const std::string_view name = CorrectionBias(); !name.empty()) {
      experts.correction_bias = names_.Vector(fmt::format("{}.{}", block, name), d_.experts);
      experts.correction_bias.as_row = style_.correction_row;
    }
    if (style_.stacked) {
      experts.gate_up = Stack(style_.stacks[0], d_.hidden, 2 * d_.expert_width);
      experts.down = Stack(style_.stacks[1], d_.expert_width, d_.hidden);
    } else {
      for (int64_t e = 0; e < d_.experts; ++e) {
        experts.each.push_back(Mlp(fmt::format("{}.experts.{}", block, e), d_.expert_width,
                                   style_.short_names ? kShortProjections : kUsualProjections));
      }
    }
    if (d_.shared_width == 0) return experts;
    const bool gated = family_.shared == SharedExperts::kGated;
    const std::string_view usual = gated ? "shared_expert" : "shared_experts";
    const std::string_view shared = style_.shared.empty() ? usual : style_.shared;
    experts.shared = Mlp(fmt::format("{}.{}", block, shared), d_.shared_width, kUsualProjections);
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

VectorTensor LayerNames::Norm(const Family& family, std::string_view name, int64_t count) const {
  if (name.empty()) return {};
  return {fmt::format("{}{}.weight", prefix_, name), count, family.one_plus_norms};
}

VectorTensor FinalNorm(const Family& family, const Dimensions& dimensions) {
  return {std::string(kFinalNormTensor), dimensions.hidden, family.one_plus_norms};
}

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
  if (name.starts_with(kPredictionPrefix) || name.starts_with("model.mtp_")) return true;
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
  const std::string block = fmt::format("{}{}.", prefix, style.block);
  style.stacked = has(block + std::string(style.stacks[0]));
  style.short_names = has(fmt::format("{}experts.0.{}.weight", block, kShortProjections[0]));
  return style;
}

}  // namespace marlin
