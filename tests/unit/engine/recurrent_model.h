// A model of which some layers keep a recurrent state: a running sum that fades.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "engine/describe_step.h"
#include "engine/mixers/recurrent.h"
#include "engine/model_impl.h"
#include "model/mixer.h"
#include "remote_backend.h"

namespace marlin::testing {

/// Has the tensors of attention. The state s of every feature of the queries becomes 3/4 s + q,
/// which is the result.
class FadingSum final : public Mixer {
 public:
  /// `padding`: floats that a state has and nobody uses.
  explicit FadingSum(int64_t padding) : padding_(padding) {}
  void ReadSizes(const Family& /*family*/, ModelConfig& /*config*/,
                 Dimensions* /*sizes*/) const override {}
  MixerTensors Tensors(const Family& /*family*/, const Dimensions& /*sizes*/,
                       const LayerNames& /*names*/) const override {
    return {};
  }
  std::vector<InputSource> Sources(const Dimensions& /*sizes*/,
                                   const MixerTensors& /*tensors*/) const override {
    return {};
  }
  /// Not a multiple of the alignment of pages.
  MixerState State(const Dimensions& sizes) const override {
    MixerState state;
    state.fixed = sizes.hidden + 3 + padding_;
    return state;
  }
  std::vector<MixerOperation> Operations() const override {
    return {{StepKind::kMix, {DecoderOperation::kRmsNorm, DecoderOperation::kAddRmsNorm}}};
  }
  void Describe(const DescribedLayer& layer,
                std::vector<StepOperation>* operations) const override {
    operations->emplace_back(MixStep{layer.index});
  }
  Status TakeValues(Pass* pass) const override {
    MARLIN_ASSIGN_OR_RETURN(
        pass->values.projected,
        pass->arena.Take(DType::kF32,
                         {pass->rows(), pass->decoder.layers.back().mixer.projections[0].out}));
    return {};
  }
  Status Run(Pass& pass, StepKind /*kind*/, int64_t layer) const override {
    const ArenaScope scope(pass.arena);
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x,
                            pass.arena.Take(pass.products.activations, pass.values.hidden.shape()));
    MARLIN_RETURN_IF_ERROR(NormalizeHidden(pass, pass.layer(layer).input_norm, x));
    MARLIN_RETURN_IF_ERROR(Apply(pass.device, pass.layer(layer).mixer.projections[0], x,
                                 pass.products, pass.values.projected));
    return ForEachTurn(pass, layer, [&](const PassTurn& turn) {
      Work work{turn.rows,
                StatesOf(pass, layer),
                {},
                turn.Rows(pass.values.projected),
                turn.Rows(MixedOf(pass, layer))};
      work.slabs.assign(work.states.slabs.begin(), work.states.slabs.end());
      if (pass.device.info().backend != "remote") return Mix(work);
      work.rows = {Local(work.rows.positions), Local(work.rows.first_rows), Local(work.rows.pages)};
      for (void*& slab : work.slabs) slab = LocalAddress(slab);
      work.inputs = Local(work.inputs);
      work.out = Local(work.out);
      return RemoteOf(pass.device).remote_decoder().Put([work] { return Mix(work); });
    });
  }

 private:
  int64_t padding_;

  struct Work {
    RecurrentRows rows;
    RecurrentStates states;
    std::vector<void*> slabs;
    MutableTensorView inputs;
    MutableTensorView out;

    float* StateOf(int32_t page) const {
      auto* const slab = static_cast<float*>(slabs[static_cast<size_t>(page / states.slab_pages)]);
      return slab + page % states.slab_pages * states.page_stride + states.first_element;
    }
  };

  static Status Mix(const Work& work) {
    const int64_t width = work.out.dim(1);
    EXPECT_EQ(work.states.first_element % 32, 0);
    for (int64_t sequence = 0; sequence < work.rows.pages.dim(0); ++sequence) {
      const auto* const pages = work.rows.pages.As<int32_t>() + 2 * sequence;
      const auto* const first = work.rows.first_rows.As<int32_t>() + sequence;
      std::vector<float> sums(static_cast<size_t>(width));
      if (pages[0] >= 0) {
        const float* const from = work.StateOf(pages[0]);
        sums.assign(from, from + width);
      }
      for (int64_t row = first[0]; row < first[1]; ++row) {
        if (work.rows.positions.As<int32_t>()[row] < 0) continue;
        for (int64_t i = 0; i < width; ++i) {
          float& sum = sums[static_cast<size_t>(i)];
          sum = 0.75F * sum + work.inputs.As<float>()[row * work.inputs.stride(0) + i];
          work.out.As<float>()[row * work.out.stride(0) + i] = sum;
        }
      }
      std::copy(sums.begin(), sums.end(), work.StateOf(pages[1]));
    }
    return {};
  }
};

/// Opens a model of attention layers and makes some of them recurrent.
inline Result<Model> OpenRecurrent(const std::string& path, const Device& device,
                                   const ModelOptions& options,
                                   const std::vector<int64_t>& layers = {1},
                                   int64_t most_bytes = INT64_MAX, bool large_states = false) {
  static const FadingSum kSmall(0);
  static const FadingSum kLarge(1 << 16);
  const FadingSum& mixer = large_states ? kLarge : kSmall;
  MARLIN_ASSIGN_OR_RETURN(Model model, Model::Open(path, device, options));
  auto& impl = const_cast<Model::Impl&>(Internals::Impl(model));
  impl.info.max_positions = 8192;
  CacheShape shape = CacheShape::Of(impl.decoder.config, impl.info.kv_cache);
  shape.most_bytes = most_bytes;
  for (const int64_t layer : layers) {
    const auto at = static_cast<size_t>(layer);
    impl.decoder.layers[at].mixer.mixer = &mixer;
    shape.layers[at] = {mixer.State(impl.decoder.config.layer(layer).sizes), 0};
  }
  MARLIN_ASSIGN_OR_RETURN(impl.pool, PagePool::Make(device, shape));
  MARLIN_ASSIGN_OR_RETURN(impl.program,
                          StepProgram::Make(device, impl.decoder,
                                            DescribeStep(impl.decoder, *impl.pool, impl.products)));
  return model;
}

}  // namespace marlin::testing
