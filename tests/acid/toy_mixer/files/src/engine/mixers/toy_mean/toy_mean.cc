// A toy mixer: a token gets the mean of the normalized hidden states up to its own, times a matrix.
#include <vector>

#include "base/macros.h"
#include "engine/mixers/paged_attention.h"
#include "model/mixer.h"

namespace marlin {
namespace {

class ToyMean final : public Mixer {
 public:
  void ReadSizes(const Family& /*family*/, ModelConfig& /*config*/,
                 Dimensions* /*sizes*/) const override {}
  MixerTensors Tensors(const Family& /*family*/, const Dimensions& sizes,
                       const LayerNames& names) const override {
    MixerTensors tensors;
    tensors.out = names.Linear("mixer.out_proj", sizes.hidden, sizes.hidden);
    return tensors;
  }
  // No tensor can take factors of the means.
  std::vector<InputSource> Sources(const Dimensions& /*sizes*/,
                                   const MixerTensors& /*tensors*/) const override {
    return {InputSource()};
  }
  MixerState State(const Dimensions& sizes) const override {
    return {1, sizes.hidden, sizes.hidden, true};
  }

  std::vector<MixerOperation> Operations() const override {
    using enum DecoderOperation;
    return {{StepKind::kMix, {kRmsNorm, kAddRmsNorm, kAppendToCache, kPagedAttention}}};
  }
  void Describe(const DescribedLayer& layer,
                std::vector<StepOperation>* operations) const override {
    operations->emplace_back(MixStep{layer.index});
  }
  /// Attention whose queries are zeros weights all tokens alike.
  Status Run(Pass& pass, StepKind /*kind*/, int64_t layer) const override {
    const ArenaScope scope(pass.arena);
    const int64_t width = pass.decoder.config.shape.hidden;
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x,
                            pass.arena.Take(DType::kF32, {pass.rows(), width}));
    MARLIN_RETURN_IF_ERROR(NormalizeHidden(pass, pass.layer(layer).input_norm, x));
    MARLIN_RETURN_IF_ERROR(AppendToCache(pass.device, HeadsIn(x, 0, 1, width), {},
                                         RowsOf(pass, layer), CacheOf(pass, layer), pass.stream()));
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView queries,
                            pass.arena.Take(DType::kF32, {pass.rows(), 1, width}));
    const std::vector<float> zeros(static_cast<size_t>(queries.ElementCount()));
    MARLIN_RETURN_IF_ERROR(pass.arena.Fill(queries, zeros.data()));
    return Attend(pass, {queries, RowsOf(pass, layer), CacheOf(pass, layer),
                         MixedHeads(pass, layer, 1, width), AttentionOptionsOf(pass, layer)});
  }
};

}  // namespace

const Mixer& ToyMeanMixer() {
  static const ToyMean kMixer;
  return kMixer;
}

}  // namespace marlin
