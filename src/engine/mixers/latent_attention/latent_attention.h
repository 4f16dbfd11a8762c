// Multi-head latent attention (MLA) of DeepSeek: low-rank keys and values, of which a sequence
// keeps the latents.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/mixer.h"

namespace marlin {

/// Indices in MixerTensors::projections and MixerLayer::projections. Either q, or q_a and q_b.
enum LatentProjection : size_t {
  kQ,    ///< From the hidden state.
  kQA,   ///< Down-projection to the low rank.
  kQB,   ///< From the normalized low rank.
  kKvA,  ///< Down-projection, and the RoPE part of all keys.
  kKvB,  ///< Per head: the key without RoPE, the value. Converted to an AbsorbedProjection.
  kLatentProjections,
};
/// The same for vectors.
enum LatentVector : size_t { kQANorm, kKvANorm, kLatentVectors };
/// ProjectionTensors::input of q_b and kv_b.
inline constexpr size_t kQueryInput = 1;
inline constexpr size_t kLatentInput = 2;

class LatentAttention final : public Mixer {
 public:
  void ReadSizes(const Family& family, ModelConfig& config, Dimensions* sizes) const override;
  MixerTensors Tensors(const Family& family, const Dimensions& sizes,
                       const LayerNames& names) const override;
  std::vector<InputSource> Sources(const Dimensions& sizes,
                                   const MixerTensors& tensors) const override;
  /// The latent and the RoPE part that all heads share, as the key of one head, whose first
  /// features are its value.
  MixerState State(const Dimensions& sizes) const override {
    return {1, sizes.kv_rank + sizes.rope_dim, sizes.kv_rank, true};
  }
  int64_t ExpandedElements(const Dimensions& sizes) const override {
    return sizes.heads * (sizes.nope_dim + sizes.rope_dim + sizes.v_dim);
  }
  int64_t RotaryDim(const Dimensions& sizes) const override { return sizes.rope_dim; }
  bool InterleavesRotary(ModelConfig& config) const override {
    return config.Bool("rope_interleave", false);
  }
  float NormEpsilon() const override { return 1e-6F; }
  float ScoreScale(const Dimensions& sizes, float rotary) const override;

  std::vector<MixerOperation> Operations() const override;
  Status Convert(const Device& device, const Dimensions& sizes, bool exact,
                 MixerLayer* layer) const override;
  int64_t ConvertedBytes(const Dimensions& sizes, bool exact) const override;
  int64_t ExpandedBytes(const PassSetting& setting) const override;

  void Describe(const DescribedLayer& layer, std::vector<StepOperation>* operations) const override;
  Status TakeValues(Pass* pass) const override;
  Status Run(Pass& pass, StepKind kind, int64_t layer) const override;
  bool Expands(const PassSetting& setting, std::span<const PassSequence> sequences) const override;
  ExpandedTables Expand(const PassSetting& setting, std::span<const PassSequence> sequences,
                        std::span<const int32_t> block_tables) const override;
};

}  // namespace marlin
