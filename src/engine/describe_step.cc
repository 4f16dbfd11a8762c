#include "engine/describe_step.h"

#include <utility>

#include "model/mixer.h"

namespace marlin {
namespace {

class Describer {
 public:
  Describer(const Decoder& decoder, const PagePool& pool, const ProductOptions& products)
      : decoder_(decoder), config_(decoder.config), pool_(pool), products_(products) {}

  StepDescription Describe() {
    if (decoder_.part.embeds()) AddEmbed();
    for (int64_t layer = 0; layer < config_.shape.layers; ++layer) {
      if (!decoder_.part.Has(layer)) continue;
      AddLayer(layer);
      const DecoderLayer& loaded = decoder_.layers[static_cast<size_t>(layer)];
      if (!loaded.embedding_gate.empty()) step_.operations.emplace_back(AddEmbeddingStep{layer});
    }
    if (decoder_.part.head) {
      step_.operations.emplace_back(HeadStep{DescribeHiddenNorm(config_, decoder_.norm),
                                             DescribeLinear(decoder_.lm_head()),
                                             config_.logit_softcap});
      step_.operations.emplace_back(SampleStep());
    }
    step_.hidden = config_.shape.hidden;
    step_.vocab = config_.shape.vocabulary;
    step_.accuracy = products_.accuracy;
    step_.allow_bf16_activations = products_.allow_bf16_activations;
    step_.determinism = products_.determinism;
    return std::move(step_);
  }

 private:
  void AddEmbed() {
    EmbedStep embed{decoder_.embedding, nullptr, config_.hidden_scale()};
    if (decoder_.embedding.empty()) embed.weights = &decoder_.embedding_projection.parts.front();
    step_.operations.emplace_back(embed);
    if (!decoder_.layer_embeddings.empty()) step_.operations.emplace_back(EmbedLayersStep());
  }

  void AddLayer(int64_t index) {
    if (config_.family->parallel) {
      AddGateUp(index);
      AddMixer(index);
      AddDown(index);
      return;
    }
    if (HasMixer(config_.shape, index)) AddMixer(index);
    if (!HasMlp(config_.shape, index)) return;
    const DecoderLayer& layer = decoder_.layers[static_cast<size_t>(index)];
    if (layer.has_both()) {
      step_.operations.emplace_back(BesideStep{index});
      return;
    }
    if (layer.experts.experts.empty()) {
      AddGateUp(index);
      AddDown(index);
      return;
    }
    RouterOptions router = config_.router;
    router.choice_bias = layer.experts.choice_bias.view();
    router.scales = layer.experts.scales.view();
    step_.operations.emplace_back(RouteStep{index, DescribeHiddenNorm(config_, layer.mlp_norm),
                                            DescribeLinear(layer.experts.router), router});
    ExpertsStep experts =
        ExpertsOf(index, layer.experts, gate(), DescribeNorm(layer.mlp_out_norm, config_.epsilon));
    experts.scales_inputs = config_.family->scales_expert_inputs;
    step_.operations.emplace_back(std::move(experts));
  }

  GateOptions gate() const { return {config_.activation, config_.gate_limit, config_.gate_alpha}; }

  void AddMixer(int64_t index) {
    const DecoderLayer& layer = decoder_.layers[static_cast<size_t>(index)];
    layer.mixer.mixer->Describe({decoder_, pool_, products_, index}, &step_.operations);
    step_.operations.emplace_back(
        ProjectAddStep{index, ProjectAddStep::From::kMixed, DescribeLinear(layer.mixer.out),
                       DescribeNorm(layer.attention_out_norm, config_.epsilon)});
  }

  void AddGateUp(int64_t index) {
    const DecoderLayer& layer = decoder_.layers[static_cast<size_t>(index)];
    step_.operations.emplace_back(GateUpStep{index, DescribeHiddenNorm(config_, layer.mlp_norm),
                                             DescribeLinear(layer.mlp.gate_up), gate()});
  }

  void AddDown(int64_t index) {
    const DecoderLayer& layer = decoder_.layers[static_cast<size_t>(index)];
    step_.operations.emplace_back(
        ProjectAddStep{index, ProjectAddStep::From::kInner, DescribeLinear(layer.mlp.down),
                       DescribeNorm(layer.mlp_out_norm, config_.epsilon),
                       layer.embedding_gate.empty() ? layer.scale : 1.0F});
  }

  static StepMlp MlpOf(const MlpLayer& mlp) {
    return {DescribeLinear(mlp.gate_up), DescribeLinear(mlp.down)};
  }

  static ExpertsStep ExpertsOf(int64_t index, const ExpertsLayer& layer, const GateOptions& gate,
                               const StepNorm& out_norm) {
    ExpertsStep step;
    step.layer = index;
    for (const MlpLayer& expert : layer.experts) step.experts.push_back(MlpOf(expert));
    step.shared = MlpOf(layer.shared);
    step.shared_gate = DescribeLinear(layer.shared_gate);
    step.gate = gate;
    step.out_norm = out_norm;
    return step;
  }

  const Decoder& decoder_;
  const DecoderConfig& config_;
  const PagePool& pool_;
  const ProductOptions& products_;
  StepDescription step_;
};

}  // namespace

StepLinear DescribeLinear(const Projection& projection) {
  TensorView bias;
  if (projection.has_bias()) bias = {projection.bias.data(), DType::kF32, {projection.out}};
  return {projection.parts, bias, projection.in, projection.out};
}

StepNorm DescribeNorm(const DeviceVector& weight, float epsilon) {
  return {weight.view(), epsilon, false};
}

StepNorm DescribeHiddenNorm(const DescribedLayer& layer) {
  return DescribeHiddenNorm(layer.decoder.config, layer.layer().input_norm);
}

StepNorm DescribeHiddenNorm(const DecoderConfig& config, const DeviceVector& weight) {
  return {weight.view(), config.hidden_epsilon(), config.family->layer_norms};
}

StepDescription DescribeStep(const Decoder& decoder, const PagePool& pool,
                             const ProductOptions& products) {
  return Describer(decoder, pool, products).Describe();
}

}  // namespace marlin
