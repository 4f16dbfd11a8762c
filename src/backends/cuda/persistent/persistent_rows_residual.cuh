// The residual of the persistent kernel with rows: strips of 32 features, each in the CTA that owns
// it.
#pragma once

#include "backends/cuda/persistent/persistent_rows_part.cuh"

namespace marlin::cuda {

/// The strips of a CTA.
class RowsResidual : private RowsPart {
 public:
  MARLIN_DEVICE explicit RowsResidual(const PersistentArguments& args) : RowsPart(args) {}

  /// Reads them from the hidden states.
  MARLIN_DEVICE void Read() const {
    ForOwned([&](int row, const Place& place) {
      if (place.part != 0) return;
      *place.residual = place.feature < args_.features ? *HiddenAt(row, place.feature)
                                                       : float4{0.0f, 0.0f, 0.0f, 0.0f};
    });
  }

  /// Adds the block of the phase before to the CTA's strips of the residual, and publishes them
  /// times the norm's weights, with the sums of their squares. Stores the residual after the last
  /// layer, or before the last projections.
  template <PersistentForm kForm>
  MARLIN_DEVICE void AddBlock(int phase) const {
    const int index = phase / kPhases;
    const int which = phase % kPhases == static_cast<int>(Phase::kQkv) ? 0 : 1;
    const float* const norm = OwnedStrips(args_).Norm(which);
    ForOwned([&](int row, const Place& place) {
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
      if (phase > args_.first_phase) sum = GatherSplits(phase - 1, row, place);
      const float4 x = Advance(place, sum);
      const bool stores = place.part == 0 && place.feature < args_.features;
      const bool is_last = phase == args_.end_phase;
      if (stores && (is_last || (IsBetween(kForm) && which == 0))) {
        *HiddenAt(row, place.feature) = x;
      }
      if (is_last) return;
      uint32_t* const words = Words(index);
      if (stores) {
        const float4 w = *reinterpret_cast<const float4*>(norm + place.owned_feature);
        PublishQuad(words + args_.exchange.inputs[which] + row * args_.features + place.feature,
                    {x.x * w.x, x.y * w.y, x.z * w.z, x.w * w.w}, Tag(index));
      }
      float squares = __fmaf_rn(x.x, x.x, x.y * x.y) + __fmaf_rn(x.z, x.z, x.w * x.w);
#pragma unroll
      for (int step = kParts; step < 32; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
      if (lane_ != 0) return;
      PublishWord(words + args_.exchange.strips_squares[which] + row * OwnedStrips::Strips(args_) +
                      place.feature / kStripOutputs,
                  squares, Tag(index));
    });
  }

 private:
  /// Where a lane has a quad of a strip and a row, which a warp has: one of four parts of the
  /// splits that are added to it.
  struct Place {
    int part;
    int feature;
    int owned_feature;  ///< Among the CTA's.
    float4* residual;
  };
  static constexpr int kParts = 4;

  MARLIN_DEVICE float4* HiddenAt(int row, int feature) const {
    return reinterpret_cast<float4*>(args_.hidden + row * args_.features + feature);
  }

  /// call(row, place) by a warp for every strip of the CTA and every row.
  template <typename Call>
  MARLIN_DEVICE void ForOwned(const Call& call) const {
    const OwnedStrips owned(args_);
    auto* const residual = reinterpret_cast<float4*>(Memory() + ResidualAt(true));
    const int quad = lane_ / kParts;
#pragma unroll 1
    for (int i = warp_; i < owned.count * args_.rows; i += kPersistentWarps) {
      const int strip = QuotientOf(i, args_.rows);
      call(i - strip * args_.rows,
           Place{lane_ % kParts, (owned.first + strip) * kStripOutputs + 4 * quad,
                 strip * kStripOutputs + 4 * quad, residual + i * (kStripOutputs / 4) + quad});
    }
  }

  /// residual += the sum over the place's parts; zeros beyond the features. Called by a warp.
  MARLIN_DEVICE float4 Advance(const Place& place, float4 sum) const {
#pragma unroll
    for (int step = 1; step < kParts; step *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, step);
      sum.y += __shfl_xor_sync(~0u, sum.y, step);
      sum.z += __shfl_xor_sync(~0u, sum.z, step);
      sum.w += __shfl_xor_sync(~0u, sum.w, step);
    }
    const float4 before = *place.residual;
    __syncwarp();
    if (place.feature >= args_.features) return {0.0f, 0.0f, 0.0f, 0.0f};
    const float4 x = {before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w};
    if (place.part == 0) *place.residual = x;
    return x;
  }
  /// A part of the splits' sums of a block.
  MARLIN_DEVICE float4 GatherSplits(int phase, int row, const Place& place) const {
    constexpr int kAtOnce = 8;
    static_assert(kAtOnce * kParts == kMostRowSplits);
    const int index = phase / kPhases;
    const PhaseGemm& gemm = tables_.GemmOf(phase);
    const int splits = gemm.splits;
    const int stride = args_.rows * gemm.columns;
    const uint32_t* const words =
        Words(index) + args_.exchange.phases[phase % kPhases] + row * gemm.columns + place.feature;
    const AwaitedQuads<kAtOnce, Polls::kFirst> quads(
        words + place.part * stride, Tag(index), [&](int i) { return i * kParts * stride; },
        [&](int i) { return place.part + i * kParts < splits; });
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (place.part + i * kParts < splits) AddTo(sum, quads.Value(i));
    }
    __syncwarp();
    return sum;
  }
};

}  // namespace marlin::cuda
