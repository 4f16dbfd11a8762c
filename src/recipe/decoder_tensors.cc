#include "recipe/decoder_tensors.h"

#include <fmt/core.h>

#include <cmath>

#include "recipe/mixer.h"

namespace marlin {
namespace {

class LayerDescriber {
 public:
  LayerDescriber(const Family& family, const Dimensions& dimensions, int64_t layer,
                 const ExpertStyle& style)
      : family_(family),
        d_(dimensions),
        layer_(layer),
        names_(LayerPrefix(family, dimensions, layer)),
        style_(style) {}

  LayerTensors Describe(bool sparse) const {
    LayerTensors layer;
    if (family_.layer_scalars) layer.scalar = names_.Vector("layer_scalar", 1);
    if (HasMixer(d_, layer_)) {
      layer.input_norm = Norm(family_.norms->input);
      layer.mixer = ParametersOf(MixerOfLayer(family_, d_, layer_))
                        .Tensors(family_, DimensionsOfLayer(d_, layer_), names_);
      layer.attention_out_norm = Norm(family_.norms->attention_out);
    }
    if (!HasMlp(d_, layer_)) return layer;
    layer.mlp_norm = family_.parallel ? layer.input_norm : Norm(family_.norms->mlp);
    layer.mlp_out_norm = Norm(family_.norms->mlp_out);
    if (sparse) layer.experts = Experts();
    if (!sparse || family_.mlp_beside) {
      layer.mlp = OwnMlp(DimensionsOfLayer(d_, layer_).intermediate);
    }
    if (sparse && family_.mlp_beside) layer.beside_out_norm = Norm(family_.norms->beside_out);
    if (d_.layer_features > 0) {
      layer.embedding_gate = names_.Linear("per_layer_input_gate", d_.hidden, d_.layer_features);
      layer.embedding_projection =
          names_.Linear("per_layer_projection", d_.layer_features, d_.hidden);
      layer.embedding_norm = Norm("post_per_layer_input_norm");
    }
    return layer;
  }

 private:
  VectorTensor Norm(std::string_view name) const { return names_.Norm(family_, name, d_.hidden); }

  MlpTensors Mlp(const std::string& block, int64_t width, const ExpertProjections& names,
                 bool bias) const {
    const auto linear = [&](std::string_view name, int64_t in, int64_t out) {
      return names_.Linear(fmt::format("{}.{}", block, name), in, out, bias);
    };
    MlpTensors mlp;
    if (family_.fused_gate_up) {
      mlp.gate_up = {linear(family_.mlp->gate_up, d_.hidden, 2 * width)};
    } else {
      if (HasGates()) mlp.gate_up.push_back(linear(names[0], d_.hidden, width));
      mlp.gate_up.push_back(linear(names[1], d_.hidden, width));
    }
    mlp.down = linear(names[2], width, d_.hidden);
    return mlp;
  }

  bool HasGates() const { return !family_.mlp->gate.empty(); }

  /// The MLP of a layer without experts, or the same as a shared expert.
  MlpTensors OwnMlp(int64_t width) const {
    const MlpNames& names = *family_.mlp;
    return Mlp(std::string(names.block), width, {names.gate, names.up, names.down}, d_.mlp_bias);
  }

  ExpertStack Stack(std::string_view name, int64_t in, int64_t out) const {
    ExpertStack stack{names_.prefix() + InBlock(name), in, out, {}};
    if (style_.biases) stack.bias_name = stack.name + "_bias";
    return stack;
  }

  /// A name in the experts' block.
  std::string InBlock(std::string_view name) const {
    return style_.block.empty() ? std::string(name) : fmt::format("{}.{}", style_.block, name);
  }

  std::string_view CorrectionBias() const {
    if (!d_.choice_bias) return {};
    const bool usual = style_.correction_bias.empty() && family_.router == RouterRule::kSigmoid;
    return usual ? "gate.e_score_correction_bias" : style_.correction_bias;
  }

  ExpertsTensors Experts() const {
    ExpertsTensors experts;
    experts.router =
        names_.Linear(InBlock(style_.router), d_.hidden, d_.experts, style_.router_bias);
    if (!style_.router_norm.empty()) {
      experts.router_norm = names_.Vector(InBlock(style_.router_norm), d_.hidden);
      experts.router_norm.scale = 1.0F / std::sqrt(static_cast<float>(d_.hidden));
    }
    if (family_.mlp_beside) {
      experts.norm = Norm(family_.norms->experts);
      experts.out_norm = Norm(family_.norms->experts_out);
    }
    if (const std::string_view name = CorrectionBias(); !name.empty()) {
      experts.correction_bias = names_.Vector(InBlock(name), d_.experts);
      experts.correction_bias.as_row = style_.correction_row;
    }
    if (!style_.scales.empty()) {
      experts.scales = names_.Vector(InBlock(style_.scales), d_.experts);
    }
    if (style_.stacked) {
      experts.gate_up = Stack(style_.stacks[0], d_.hidden, (HasGates() ? 2 : 1) * d_.expert_width);
      experts.down = Stack(style_.stacks[1], d_.expert_width, d_.hidden);
    } else {
      for (int64_t e = 0; e < d_.experts; ++e) {
        experts.each.push_back(Mlp(InBlock(fmt::format("experts.{}", e)), d_.expert_width,
                                   style_.short_names ? kShortProjections : kUsualProjections,
                                   /*bias=*/false));
      }
    }
    if (d_.shared_width == 0) return experts;
    if (family_.shared == SharedExperts::kMlp) {
      experts.shared = OwnMlp(d_.shared_width);
      return experts;
    }
    const bool gated = family_.shared == SharedExperts::kGated;
    const std::string_view usual = gated ? "shared_expert" : "shared_experts";
    const std::string_view shared = style_.shared.empty() ? usual : style_.shared;
    experts.shared = Mlp(InBlock(shared), d_.shared_width, kUsualProjections, d_.mlp_bias);
    if (gated) experts.shared_gate = names_.Linear(InBlock("shared_expert_gate"), d_.hidden, 1);
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
  return {std::string(family.final_norm), dimensions.hidden, family.one_plus_norms};
}

LayerEmbeddingTensors LayerEmbeddingsOf(const Family& family, const Dimensions& dimensions) {
  LayerEmbeddingTensors tensors;
  const int64_t features = dimensions.layer_features;
  if (features == 0) return tensors;
  tensors.projection = {"model.per_layer_model_projection", dimensions.hidden,
                        dimensions.layers * features};
  tensors.norm = {"model.per_layer_projection_norm.weight", features, family.one_plus_norms};
  tensors.norm.scale = kLayerEmbeddingFactor;
  return tensors;
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

std::string LayerPrefix(const Family& family, const Dimensions& dimensions, int64_t layer) {
  const std::string_view module = family.prediction->module;
  if (layer < dimensions.layers || module.empty()) return LayerPrefix(layer);
  return fmt::format("{}layers.{}.", module, layer - dimensions.layers);
}

PredictionTensors DescribePrediction(const Family& family, const Dimensions& dimensions,
                                     int64_t layer) {
  const PredictionNames& own = *family.prediction;
  const bool follows = own.module.empty();
  const LayerNames names(follows ? LayerPrefix(layer) : std::string(own.module));
  const int64_t hidden = dimensions.hidden;
  PredictionTensors tensors;
  tensors.embedding_norm = names.Norm(family, own.embedding_norm, hidden);
  tensors.hidden_norm = names.Norm(family, own.hidden_norm, hidden);
  tensors.join = names.Linear(own.join, 2 * hidden, hidden);
  tensors.norm = names.Norm(family, own.norm, hidden);
  if (!follows) return tensors;
  tensors.embedding = names.prefix() + "embed_tokens.weight";
  tensors.head = names.prefix() + "shared_head.head.weight";
  return tensors;
}

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

ExpertStyle FindExpertStyle(const Family& family, const Dimensions& dimensions, int64_t layer,
                            FunctionRef<bool(const std::string&)> has) {
  ExpertStyle style = family.experts == nullptr ? ExpertStyle() : *family.experts;
  const std::string prefix = LayerPrefix(family, dimensions, layer);
  // Checkpoints of Mixtral rename the block, the matrices or both, or stack all experts.
  for (const std::string_view block : kExpertBlocks) {
    if (has(fmt::format("{}{}.{}.weight", prefix, block, style.router))) style.block = block;
  }
  const std::string block = prefix + std::string(style.block) + (style.block.empty() ? "" : ".");
  style.stacked = has(block + std::string(style.stacks[0]));
  style.short_names = has(fmt::format("{}experts.0.{}.weight", block, kShortProjections[0]));
  return style;
}

}  // namespace marlin
