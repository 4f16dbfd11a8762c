// Gated delta nets (https://arxiv.org/abs/2412.06464): a causal convolution of the inputs, and a
// recurrence whose state has a fixed size.
#include <fmt/core.h>

#include <utility>

#include "base/macros.h"
#include "engine/describe_step.h"
#include "engine/mixers/paged_attention.h"
#include "engine/mixers/recurrent.h"
#include "marlin/recurrent.h"
#include "model/mixer.h"

namespace marlin {
namespace {

/// Indices in MixerTensors and MixerLayer.
constexpr size_t kInputs = 0;
enum DeltaVector : size_t { kConv, kLogDecay, kDecayBias, kNorm };

GatedDeltaSizes SizesOf(const Dimensions& d) {
  return {d.delta_key_heads, d.delta_value_heads, d.delta_key_dim, d.delta_value_dim, d.conv_width};
}

/// The features of all heads together.
int64_t Keys(const Dimensions& d) { return d.delta_key_heads * d.delta_key_dim; }
int64_t Values(const Dimensions& d) { return d.delta_value_heads * d.delta_value_dim; }

class GatedDeltaNet final : public Mixer {
 public:
  void ReadSizes(const Family& family, ModelConfig& config, Dimensions* sizes) const override;
  MixerTensors Tensors(const Family& family, const Dimensions& sizes,
                       const LayerNames& names) const override;
  /// The gated norm's weights are shared by heads, and its gates are not linear.
  std::vector<InputSource> Sources(const Dimensions& /*sizes*/,
                                   const MixerTensors& /*tensors*/) const override {
    return {InputSource()};
  }
  MixerState State(const Dimensions& sizes) const override {
    MixerState state;
    state.fixed = SizesOf(sizes).state_elements();
    return state;
  }

  std::vector<MixerOperation> Operations() const override {
    using enum DecoderOperation;
    return {{StepKind::kGatedDelta, {kRmsNorm, kAddRmsNorm, kGatedDelta}}};
  }
  void Describe(const DescribedLayer& layer, std::vector<StepOperation>* operations) const override;
  Status Run(Pass& pass, StepKind kind, int64_t layer) const override;
};

void GatedDeltaNet::ReadSizes(const Family& /*family*/, ModelConfig& config,
                              Dimensions* sizes) const {
  sizes->delta_key_heads = config.Size("linear_num_key_heads", kMaxHeads);
  sizes->delta_value_heads = config.Size("linear_num_value_heads", kMaxHeads);
  sizes->delta_key_dim = config.Size("linear_key_head_dim", kMaxWidth);
  sizes->delta_value_dim = config.Size("linear_value_head_dim", kMaxWidth);
  sizes->conv_width = config.Size("linear_conv_kernel_dim", kMaxConvWidth);
  if (sizes->delta_value_heads % sizes->delta_key_heads != 0) {
    config.Fail("linear_num_value_heads",
                fmt::format("{} are not a multiple of linear_num_key_heads {}",
                            sizes->delta_value_heads, sizes->delta_key_heads));
  }
  const std::string activation = config.StringOr("hidden_act", "silu");
  if (activation != "silu" && activation != "swish") {
    config.Fail("hidden_act", "linear_attention layers have silu only");
  }
}

MixerTensors GatedDeltaNet::Tensors(const Family& family, const Dimensions& sizes,
                                    const LayerNames& names) const {
  const int64_t heads = sizes.delta_value_heads;
  const int64_t channels = 2 * Keys(sizes) + Values(sizes);
  const auto linear = [&](const char* name, int64_t out) {
    return names.Linear(name, sizes.hidden, out);
  };
  MixerTensors tensors;
  std::vector<LinearTensors>& inputs = tensors.projections.emplace_back().layers;
  if (family.delta_by_head) {
    inputs = {linear("linear_attn.in_proj_qkvz", channels + Values(sizes)),
              linear("linear_attn.in_proj_ba", 2 * heads)};
  } else {
    inputs = {linear("linear_attn.in_proj_qkv", channels),
              linear("linear_attn.in_proj_z", Values(sizes)),
              linear("linear_attn.in_proj_b", heads), linear("linear_attn.in_proj_a", heads)};
  }
  tensors.out = names.Linear("linear_attn.out_proj", Values(sizes), sizes.hidden);
  tensors.vectors.resize(kNorm + 1);
  VectorTensor& conv = tensors.vectors[kConv];
  conv = names.Vector("linear_attn.conv1d.weight", channels * sizes.conv_width);
  conv.conv_width = sizes.conv_width;
  tensors.vectors[kLogDecay] = names.Vector("linear_attn.A_log", heads);
  tensors.vectors[kDecayBias] = names.Vector("linear_attn.dt_bias", heads);
  tensors.vectors[kNorm] = names.Vector("linear_attn.norm.weight", sizes.delta_value_dim);
  return tensors;
}

/// Cuts the columns of projected rows into parts [rows, key_heads, width], one after another.
class HeadColumns {
 public:
  HeadColumns(const MutableTensorView& rows, int64_t key_heads) : rows_(rows), heads_(key_heads) {}

  /// Some of `of` columns that each key head has side by side.
  TensorView Part(int64_t width, int64_t of) {
    const TensorView part(rows_.As<float>() + next_, DType::kF32, {rows_.dim(0), heads_, width},
                          {rows_.stride(0), of, 1});
    next_ += width;
    return part;
  }
  TensorView All(int64_t width) {
    const TensorView all = Part(width, width);
    Skip((heads_ - 1) * width);
    return all;
  }
  void Skip(int64_t columns) { next_ += columns; }

 private:
  const MutableTensorView& rows_;
  int64_t heads_;
  int64_t next_ = 0;
};

GatedDeltaInputs InputsIn(const MutableTensorView& projected, const Dimensions& d, bool by_head) {
  const int64_t heads = d.delta_value_heads / d.delta_key_heads;
  const int64_t keys = d.delta_key_dim;
  const int64_t values = heads * d.delta_value_dim;
  HeadColumns columns(projected, d.delta_key_heads);
  GatedDeltaInputs inputs;
  if (!by_head) {
    inputs.queries = columns.All(keys);
    inputs.keys = columns.All(keys);
    inputs.values = columns.All(values);
    inputs.gates = columns.All(values);
    inputs.writes = columns.All(heads);
    inputs.decays = columns.All(heads);
    return inputs;
  }
  const int64_t of_head = 2 * keys + 2 * values;
  inputs.queries = columns.Part(keys, of_head);
  inputs.keys = columns.Part(keys, of_head);
  inputs.values = columns.Part(values, of_head);
  inputs.gates = columns.Part(values, of_head);
  columns.Skip((d.delta_key_heads - 1) * of_head);
  inputs.writes = columns.Part(heads, 2 * heads);
  inputs.decays = columns.Part(heads, 2 * heads);
  return inputs;
}

GatedDeltaWeights WeightsOf(const DecoderConfig& config, const MixerLayer& mixer,
                            const Dimensions& sizes) {
  const GatedDeltaSizes net = SizesOf(sizes);
  return {ConvWeights(mixer.vectors[kConv], net.channels(), net.conv_width),
          mixer.vectors[kLogDecay].view(),
          mixer.vectors[kDecayBias].view(),
          mixer.vectors[kNorm].view(),
          config.epsilon,
          net};
}

void GatedDeltaNet::Describe(const DescribedLayer& layer,
                             std::vector<StepOperation>* operations) const {
  const DecoderConfig& config = layer.decoder.config;
  const MixerLayer& mixer = layer.layer().mixer;
  GatedDeltaStep step;
  step.layer = layer.index;
  step.norm = DescribeHiddenNorm(layer);
  step.linear = DescribeLinear(mixer.projections[kInputs]);
  step.weights = WeightsOf(config, mixer, config.layer(layer.index).sizes);
  step.by_head = config.family->delta_by_head;
  step.cache_group = layer.pool.GroupOf(layer.index);
  step.states = layer.pool.StatesOf(layer.index, {});
  operations->emplace_back(step);
}

Status GatedDeltaNet::Run(Pass& pass, StepKind /*kind*/, int64_t layer) const {
  const ArenaScope scope(pass.arena);
  const DecoderConfig& config = pass.decoder.config;
  const Dimensions& sizes = config.layer(layer).sizes;
  const MixerLayer& mixer = pass.layer(layer).mixer;
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView projected,
                          ProjectHidden(pass, layer, mixer.projections[kInputs]));
  const GatedDeltaSizes net = SizesOf(sizes);
  const GatedDeltaWeights weights = WeightsOf(config, mixer, sizes);
  const RecurrentStates states = StatesOf(pass, layer);
  MARLIN_RETURN_IF_ERROR(ForEachTurn(pass, layer, [&](const PassTurn& turn) {
    return GatedDelta(
        pass.device, InputsIn(turn.Rows(projected), sizes, config.family->delta_by_head), weights,
        turn.rows, states, turn.Heads(MixedOf(pass, layer), net.value_heads, net.value_dim),
        pass.products.determinism, pass.stream());
  }));
  return Ended(pass, StepPart::kAttention);
}

}  // namespace

const Mixer& GatedDeltaMixer() {
  static const GatedDeltaNet kMixer;
  return kMixer;
}

}  // namespace marlin
