// Queries of a low rank in the persistent kernel with rows between attentions, before their second
// projection.
#pragma once

#include "backends/cuda/persistent/persistent_between.cuh"
#include "backends/cuda/persistent/persistent_rows_part.cuh"

namespace marlin::cuda {

/// Called by all threads that compute.
template <bool kLimbs>
class RowsQueries : private RowsPart {
 public:
  MARLIN_DEVICE explicit RowsQueries(const PersistentArguments& args) : RowsPart(args) {}

  /// All rows' queries times their norm's weights, as activations, and the warps' sums of their
  /// squares.
  MARLIN_DEVICE void Gather(int phase) const {
    constexpr int kAtOnce = 4;
    const PersistentLayer& layer = LayerOf(phase);
    const int index = phase / kPhases;
    const PhaseGemm& inputs = layer.gemms[static_cast<int>(Phase::kQkv)];
    const Schedule& schedule = tables_.ScheduleOf(tables_.GemmOf(phase));
    const uint32_t* const words =
        Words(index) + args_.exchange.phases[static_cast<int>(Phase::kQkv)];
    const bool exists = 4 * thread_ < inputs.n;
    const int quad = thread_ - schedule.first_k_tile * (kTileK / 4);
    const int quads = (schedule.end_k_tile - schedule.first_k_tile) * (kTileK / 4);
    float4 w = {0.0f, 0.0f, 0.0f, 0.0f};
    if (exists) w = reinterpret_cast<const float4*>(layer.query_norm)[thread_];
#pragma unroll 1
    for (int first = 0; first < args_.rows; first += kAtOnce) {
      int places[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i;
        places[i] = exists && row < args_.rows ? row * inputs.columns + 4 * thread_ : -1;
      }
      float4 sums[kAtOnce];
      GatherSums<1>(words, places, inputs.splits, args_.rows * inputs.columns, Tag(index), sums);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i;
        if (row >= args_.rows) break;
        const float squares = WarpSum(Squares(sums[i]));
        if (lane_ == 0) Rows().dots[0][row][warp_] = squares;
        if (quad >= 0 && quad < quads)
          StoreActivations<kLimbs>(args_, quad, Times(sums[i], w), row);
      }
    }
  }

  /// The norm's factors of all rows, after a barrier: they may be read after another one.
  MARLIN_DEVICE void FindFactors(int phase) const {
    if (warp_ >= args_.rows) return;
    const PersistentLayer& layer = LayerOf(phase);
    const auto count = static_cast<float>(layer.gemms[static_cast<int>(Phase::kQkv)].n);
    const float sum = WarpSum(lane_ < kPersistentWarps ? Rows().dots[0][warp_][lane_] : 0.0f);
    if (lane_ != 0) return;
    Rows().factors[warp_] = rsqrtf(__fdividef(sum, count) + layer.query_epsilon);
  }
};

}  // namespace marlin::cuda
