// Mamba-2 mixers (https://arxiv.org/abs/2405.21060): a causal convolution of
// the inputs, and a state-space recurrence whose state has a fixed size.
#include <fmt/core.h>

#include <limits>

#include "base/macros.h"
#include "engine/mixers/paged_attention.h"
#include "engine/mixers/recurrent.h"
#include "marlin/recurrent.h"
#include "model/mixer.h"

namespace marlin {
namespace {

constexpr double kMostStep = 1e6;
constexpr double kNoLimit = std::numeric_limits<double>::infinity();

Mamba2Sizes Mamba2SizesOf(const Dimensions& d) {
  return {d.mamba_heads, d.mamba_groups, d.mamba_head_dim, d.mamba_state_size, d.conv_width};
}

class Mamba2Net final : public Mixer {
 public:
  void ReadSizes(const Family& family, ModelConfig& config, Dimensions* sizes) const override;
  MixerTensors Tensors(const Family& family, const Dimensions& sizes,
                       const LayerNames& names) const override;
  /// The norm comes after the gate.
  std::vector<InputSource> Sources(const Dimensions& /*sizes*/,
                                   const MixerTensors& tensors) const override {
    InputSource mixed;
    mixed.norm = tensors.vectors[kNorm];
    return {mixed};
  }
  MixerState State(const Dimensions& sizes) const override {
    MixerState state;
    state.fixed = Mamba2SizesOf(sizes).state_elements();
    return state;
  }

  std::vector<MixerOperation> Operations() const override {
    using enum DecoderOperation;
    return {{StepKind::kMix, {kRmsNorm, kAddRmsNorm, kMamba2}}};
  }
  void Describe(const DescribedLayer& layer,
                std::vector<StepOperation>* operations) const override {
    operations->emplace_back(MixStep{layer.index});
  }
  Status Run(Pass& pass, StepKind kind, int64_t layer) const override;

 private:
  /// Indices in MixerTensors and MixerLayer.
  static constexpr size_t kInputs = 0;
  enum Vector : size_t { kConv, kConvBias, kLogDecay, kStepBias, kSkip, kNorm };
};

/// The limits of steps: time_step_min, or the two of time_step_limit, or 0 and none.
void ReadStepLimits(ModelConfig& config, Dimensions* sizes) {
  constexpr std::string_view kKey = "time_step_limit";
  const std::vector<double> limits = config.RealsOrEmpty(kKey, 0, kNoLimit);
  sizes->min_step = limits.empty() ? 0 : limits.front();
  sizes->max_step = kNoLimit;
  if (!limits.empty()) sizes->max_step = limits.back();
  if (config.Has("time_step_min")) sizes->min_step = config.Real("time_step_min", 0, kMostStep);
  const bool wrong = !limits.empty() && (limits.size() != 2 || limits[1] < limits[0]);
  if (wrong) config.Fail(kKey, "expected the least step and the greatest one");
}

/// The heads have the features of mamba_expand, in types that know it.
void ReadHeadDim(ModelConfig& config, Dimensions* sizes) {
  const bool expands = config.Knows("mamba_expand");
  const int64_t features =
      expands ? sizes->hidden * config.Size("mamba_expand", kMaxHeads) : int64_t{0};
  if (expands && (!config.Has("mamba_d_head") || config.IsText("mamba_d_head", "auto"))) {
    sizes->mamba_head_dim = features / sizes->mamba_heads;
  } else {
    sizes->mamba_head_dim = config.Size("mamba_d_head", kMaxWidth);
  }
  if (expands && sizes->mamba_head_dim * sizes->mamba_heads != features) {
    config.Fail("mamba_n_heads", fmt::format("{} heads are not the {} features of mamba_expand",
                                             sizes->mamba_heads, features));
  }
}

void Mamba2Net::ReadSizes(const Family& /*family*/, ModelConfig& config, Dimensions* sizes) const {
  sizes->mamba_heads = config.Size("mamba_n_heads", kMaxHeads);
  sizes->mamba_groups = config.Size("mamba_n_groups", kMaxHeads);
  sizes->mamba_state_size = config.Size("mamba_d_state", kMaxWidth);
  sizes->conv_width = config.Size("mamba_d_conv", kMaxConvWidth);
  sizes->conv_bias = config.Bool("mamba_conv_bias", true);
  sizes->linear_mixer_bias =
      config.Bool(config.Knows("use_bias") ? "use_bias" : "mamba_proj_bias", false);
  ReadHeadDim(config, sizes);
  if (sizes->mamba_heads % sizes->mamba_groups != 0) {
    config.Fail("mamba_n_heads", fmt::format("{} are not a multiple of mamba_n_groups {}",
                                             sizes->mamba_heads, sizes->mamba_groups));
  }
  ReadStepLimits(config, sizes);
  const std::string_view key = config.Knows("mamba_hidden_act") ? "mamba_hidden_act" : "hidden_act";
  const std::string activation = config.StringOr(key, "silu");
  if (activation != "silu" && activation != "swish") {
    config.Fail(key, "Mamba-2 layers have silu only");
  }
}

MixerTensors Mamba2Net::Tensors(const Family& family, const Dimensions& sizes,
                                const LayerNames& names) const {
  const Mamba2Sizes net = Mamba2SizesOf(sizes);
  const auto name = [&](std::string_view part) {
    return fmt::format("{}.{}", family.mixers->linear, part);
  };
  const auto vector = [&](std::string_view part, int64_t count) {
    return names.Vector(name(part), count);
  };
  const int64_t columns = net.features() + net.channels() + net.heads;
  const bool bias = sizes.linear_mixer_bias;
  MixerTensors tensors;
  tensors.projections.emplace_back().layers = {
      names.Linear(name("in_proj"), sizes.hidden, columns, bias)};
  tensors.out = names.Linear(name("out_proj"), net.features(), sizes.hidden, bias);
  tensors.vectors.resize(kNorm + 1);
  tensors.vectors[kConv] = vector("conv1d.weight", net.channels() * net.conv_width);
  tensors.vectors[kConv].conv_width = net.conv_width;
  if (sizes.conv_bias) tensors.vectors[kConvBias] = vector("conv1d.bias", net.channels());
  tensors.vectors[kLogDecay] = vector("A_log", net.heads);
  tensors.vectors[kStepBias] = vector("dt_bias", net.heads);
  tensors.vectors[kSkip] = vector("D", net.heads);
  tensors.vectors[kNorm] = vector("norm.weight", net.features());
  return tensors;
}

/// The columns of projected rows: gates, values, keys, queries, steps.
Mamba2Inputs InputsIn(const MutableTensorView& projected, const Mamba2Sizes& sizes) {
  int64_t next = 0;
  const auto take = [&](int64_t heads, int64_t width) {
    const TensorView part(projected.As<float>() + next, DType::kF32,
                          {projected.dim(0), heads, width}, {projected.stride(0), width, 1});
    next += heads * width;
    return part;
  };
  Mamba2Inputs inputs;
  inputs.gates = take(sizes.heads, sizes.head_dim);
  inputs.values = take(sizes.heads, sizes.head_dim);
  inputs.keys = take(sizes.groups, sizes.state_size);
  inputs.queries = take(sizes.groups, sizes.state_size);
  inputs.steps = TensorView(projected.As<float>() + next, DType::kF32,
                            {projected.dim(0), sizes.heads}, {projected.stride(0), 1});
  return inputs;
}

Status Mamba2Net::Run(Pass& pass, StepKind /*kind*/, int64_t layer) const {
  const ArenaScope scope(pass.arena);
  const DecoderConfig& config = pass.decoder.config;
  const MixerLayer& mixer = pass.layer(layer).mixer;
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView projected,
                          ProjectHidden(pass, layer, mixer.projections[kInputs]));
  const Dimensions& sizes = config.layer(layer).sizes;
  const Mamba2Sizes net = Mamba2SizesOf(sizes);
  const auto vector = [&](Vector index) { return mixer.vectors[index].view(); };
  Mamba2Weights weights;
  weights.conv = ConvWeights(mixer.vectors[kConv], net.channels(), net.conv_width);
  weights.conv_bias = vector(kConvBias);
  weights.log_decay = vector(kLogDecay);
  weights.step_bias = vector(kStepBias);
  weights.skip = vector(kSkip);
  weights.norm = vector(kNorm);
  weights.epsilon = config.epsilon;
  weights.min_step = static_cast<float>(sizes.min_step);
  weights.max_step = static_cast<float>(sizes.max_step);
  weights.sizes = net;
  const RecurrentStates states = StatesOf(pass, layer);
  MARLIN_RETURN_IF_ERROR(ForEachTurn(pass, layer, [&](const PassTurn& turn) {
    return Mamba2(pass.device, InputsIn(turn.Rows(projected), net), weights, turn.rows, states,
                  turn.Heads(MixedOf(pass, layer), net.heads, net.head_dim),
                  pass.products.determinism, pass.stream());
  }));
  return Ended(pass, StepPart::kAttention);
}

}  // namespace

const Mixer& Mamba2Mixer() {
  static const Mamba2Net kMixer;
  return kMixer;
}

}  // namespace marlin
