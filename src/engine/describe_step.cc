#include "engine/describe_step.h"

#include <utility>

namespace marlin {
namespace {

StepLinear LinearOf(const Projection& projection) {
  TensorView bias;
  if (projection.has_bias()) bias = {projection.bias.data(), DType::kF32, {projection.out}};
  return {projection.parts, bias, projection.in, projection.out};
}

StepNorm NormOf(const DeviceVector& weight, float epsilon) { return {weight.view(), epsilon}; }

class Describer {
 public:
  Describer(const Decoder& decoder, const PagePool& pool, const ProductOptions& products)
      : decoder_(decoder), config_(decoder.config), pool_(pool), products_(products) {}

  StepDescription Describe() {
    EmbedStep embed{decoder_.embedding, nullptr};
    if (decoder_.embedding.empty()) embed.weights = &decoder_.embedding_projection.parts.front();
    step_.operations.emplace_back(embed);
    for (int64_t layer = 0; layer < config_.shape.layers; ++layer) AddLayer(layer);
    step_.operations.emplace_back(
        HeadStep{NormOf(decoder_.norm, config_.epsilon), LinearOf(decoder_.lm_head())});
    step_.operations.emplace_back(SampleStep());
    step_.hidden = config_.shape.hidden;
    step_.vocab = config_.shape.vocabulary;
    step_.accuracy = products_.accuracy;
    step_.allow_bf16_activations = products_.allow_bf16_activations;
    step_.determinism = products_.determinism;
    return std::move(step_);
  }

 private:
  void AddLayer(int64_t index) {
    const DecoderLayer& layer = decoder_.layers[static_cast<size_t>(index)];
    const StepNorm input_norm = NormOf(layer.input_norm, config_.epsilon);
    if (config_.latent()) {
      const LatentAttentionLayer& latent = layer.latent;
      step_.operations.emplace_back(
          LatentProjectStep{index, input_norm, LinearOf(latent.q), LinearOf(latent.q_a),
                            NormOf(latent.q_a_norm, kLatentEpsilon), LinearOf(latent.q_b),
                            LinearOf(latent.kv_a), NormOf(latent.kv_a_norm, kLatentEpsilon)});
    } else {
      step_.operations.emplace_back(ProjectStep{index, input_norm, LinearOf(layer.attention.qkv)});
    }
    step_.operations.emplace_back(AttentionOf(index, layer));
    step_.operations.emplace_back(
        ProjectAddStep{index, ProjectAddStep::From::kMixed,
                       LinearOf(config_.latent() ? layer.latent.out : layer.attention.out),
                       NormOf(layer.attention_out_norm, config_.epsilon)});
    const StepNorm norm = NormOf(layer.mlp_norm, config_.epsilon);
    const StepNorm out_norm = NormOf(layer.mlp_out_norm, config_.epsilon);
    const GateOptions gate{config_.activation, config_.gate_limit, config_.gate_alpha};
    if (layer.experts.experts.empty()) {
      step_.operations.emplace_back(GateUpStep{index, norm, LinearOf(layer.mlp.gate_up), gate});
      step_.operations.emplace_back(
          ProjectAddStep{index, ProjectAddStep::From::kInner, LinearOf(layer.mlp.down), out_norm});
      return;
    }
    RouterOptions router = config_.router;
    router.choice_bias = layer.experts.choice_bias.view();
    step_.operations.emplace_back(RouteStep{index, norm, LinearOf(layer.experts.router), router});
    step_.operations.emplace_back(ExpertsOf(index, layer.experts, gate, out_norm));
  }

  AttentionStep AttentionOf(int64_t index, const DecoderLayer& all) const {
    const AttentionLayer& layer = all.attention;
    const Dimensions& shape = config_.shape;
    AttentionStep step;
    step.layer = index;
    step.heads = shape.heads;
    step.kv_heads = config_.cache_heads();
    step.key_dim = config_.cache_key_dim();
    step.value_dim = config_.cache_value_dim();
    step.rope_dim = config_.latent() ? shape.rope_dim : 0;
    step.latent_keys = all.latent.kv_b.key_matrices;
    step.latent_values = all.latent.kv_b.value_matrices;
    step.q_norm = NormOf(layer.q_norm, config_.epsilon);
    step.k_norm = NormOf(layer.k_norm, config_.epsilon);
    step.rotary = {decoder_.inverse_frequencies.view(), config_.rotary.attention_factor,
                   config_.interleaved_rotary};
    step.options.scale = config_.score_scale;
    step.options.window = config_.windows[static_cast<size_t>(index)];
    step.options.sinks = layer.sinks.view();
    step.options.accuracy = products_.accuracy;
    step.cache_group = pool_.GroupOf(index);
    step.cache = pool_.CacheOf(index, {});
    return step;
  }

  static StepMlp MlpOf(const MlpLayer& mlp) { return {LinearOf(mlp.gate_up), LinearOf(mlp.down)}; }

  static ExpertsStep ExpertsOf(int64_t index, const ExpertsLayer& layer, const GateOptions& gate,
                               const StepNorm& out_norm) {
    ExpertsStep step;
    step.layer = index;
    for (const MlpLayer& expert : layer.experts) step.experts.push_back(MlpOf(expert));
    step.shared = MlpOf(layer.shared);
    step.shared_gate = LinearOf(layer.shared_gate);
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

StepDescription DescribeStep(const Decoder& decoder, const PagePool& pool,
                             const ProductOptions& products) {
  return Describer(decoder, pool, products).Describe();
}

}  // namespace marlin
