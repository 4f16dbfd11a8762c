// Gated short convolutions (LFM2): a causal convolution of a few tokens between two gates.
#include <fmt/core.h>

#include <numeric>

#include "base/macros.h"
#include "engine/mixers/paged_attention.h"
#include "engine/mixers/recurrent.h"
#include "marlin/recurrent.h"
#include "model/mixer.h"

namespace marlin {
namespace {

ShortConvolutionSizes ConvolutionSizesOf(const Dimensions& d) { return {d.hidden, d.conv_width}; }

class ShortConvolutionNet final : public Mixer {
 public:
  void ReadSizes(const Family& family, ModelConfig& config, Dimensions* sizes) const override;
  MixerTensors Tensors(const Family& family, const Dimensions& sizes,
                       const LayerNames& names) const override;
  /// A feature of what is mixed is a product with one of the second gates.
  std::vector<InputSource> Sources(const Dimensions& sizes,
                                   const MixerTensors& tensors) const override {
    InputSource mixed;
    mixed.linear = tensors.projections[kInputs].layers.front();
    mixed.outputs.resize(static_cast<size_t>(sizes.hidden));
    std::iota(mixed.outputs.begin(), mixed.outputs.end(), sizes.hidden);
    return {mixed};
  }
  MixerState State(const Dimensions& sizes) const override {
    MixerState state;
    state.fixed = ConvolutionSizesOf(sizes).state_elements();
    return state;
  }

  std::vector<MixerOperation> Operations() const override {
    using enum DecoderOperation;
    return {{StepKind::kMix, {kRmsNorm, kAddRmsNorm, kShortConvolution}}};
  }
  void Describe(const DescribedLayer& layer,
                std::vector<StepOperation>* operations) const override {
    operations->emplace_back(MixStep{layer.index});
  }
  Status Run(Pass& pass, StepKind kind, int64_t layer) const override;

 private:
  /// Indices in MixerTensors and MixerLayer.
  static constexpr size_t kInputs = 0;
  enum Vector : size_t { kConv, kConvBias };
};

void ShortConvolutionNet::ReadSizes(const Family& /*family*/, ModelConfig& config,
                                    Dimensions* sizes) const {
  sizes->conv_width = config.Size("conv_L_cache", kMaxConvWidth);
  if (sizes->conv_width < 2 && config.status().ok()) {
    config.Fail("conv_L_cache", fmt::format("expected 2..{}, got 1", kMaxConvWidth));
  }
  sizes->conv_bias = config.Bool("conv_bias", false);
  sizes->linear_mixer_bias = sizes->conv_bias;
}

MixerTensors ShortConvolutionNet::Tensors(const Family& family, const Dimensions& sizes,
                                          const LayerNames& names) const {
  const auto name = [&](std::string_view part) {
    return fmt::format("{}.{}", family.mixers->linear, part);
  };
  const int64_t hidden = sizes.hidden;
  MixerTensors tensors;
  tensors.projections.emplace_back().layers = {
      names.Linear(name("in_proj"), hidden, 3 * hidden, sizes.linear_mixer_bias)};
  tensors.out = names.Linear(name("out_proj"), hidden, hidden, sizes.linear_mixer_bias);
  tensors.vectors.resize(kConvBias + 1);
  tensors.vectors[kConv] = names.Vector(name("conv.weight"), hidden * sizes.conv_width);
  tensors.vectors[kConv].conv_width = sizes.conv_width;
  if (sizes.conv_bias) tensors.vectors[kConvBias] = names.Vector(name("conv.bias"), hidden);
  return tensors;
}

Status ShortConvolutionNet::Run(Pass& pass, StepKind /*kind*/, int64_t layer) const {
  const ArenaScope scope(pass.arena);
  const MixerLayer& mixer = pass.layer(layer).mixer;
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView projected,
                          ProjectHidden(pass, layer, mixer.projections[kInputs]));
  const ShortConvolutionSizes sizes = ConvolutionSizesOf(pass.decoder.config.layer(layer).sizes);
  const ShortConvolutionWeights weights{
      ConvWeights(mixer.vectors[kConv], sizes.channels, sizes.conv_width),
      mixer.vectors[kConvBias].view(), sizes};
  const RecurrentStates states = StatesOf(pass, layer);
  MARLIN_RETURN_IF_ERROR(ForEachTurn(pass, layer, [&](const PassTurn& turn) {
    const MutableTensorView rows = turn.Rows(projected);
    const auto part = [&](int64_t index) {
      return TensorView(rows.As<float>() + index * sizes.channels, DType::kF32,
                        {rows.dim(0), sizes.channels}, {rows.stride(0), 1});
    };
    return ShortConvolution(pass.device, {part(2), part(0), part(1)}, weights, turn.rows, states,
                            turn.Rows(MixedOf(pass, layer)), pass.stream());
  }));
  return Ended(pass, StepPart::kAttention);
}

}  // namespace

const Mixer& ShortConvolutionMixer() {
  static const ShortConvolutionNet kMixer;
  return kMixer;
}

}  // namespace marlin
