// The results of a phase in the persistent kernel with rows: the sums of the CTA's units.
#pragma once

#include "backends/cuda/persistent/persistent_rows_part.cuh"

namespace marlin::cuda {

/// Publishes sums. Called by all threads that compute.
class RowsOutputs : private RowsPart {
 public:
  MARLIN_DEVICE explicit RowsOutputs(const PersistentArguments& args) : RowsPart(args) {}

  /// Adds the warps' sums of the CTA's units and publishes them, with their biases: a thread has
  /// four outputs of a unit and a row.
  template <PersistentForm kForm>
  MARLIN_DEVICE void Publish(int phase, const Schedule& schedule) const {
    const PersistentLayer& layer = LayerOf(phase);
    const PhaseGemm& gemm = tables_.GemmOf(phase);
    const int which = phase % kPhases;
    const bool of_experts = layer.experts != nullptr && which >= static_cast<int>(Phase::kGates);
    const bool gates = which == static_cast<int>(Phase::kGates);
    const bool of_queries =
        IsBetween(kForm) && which == static_cast<int>(Phase::kOut) && phase != args_.first_phase;
    const bool normalized = gates || which == static_cast<int>(Phase::kQkv) || of_queries;
    const uint32_t tag = Tag(phase / kPhases);
    uint32_t* const words = Words(phase / kPhases) + args_.exchange.phases[which];
    constexpr int kQuads = kStripOutputs / 4;
#pragma unroll 1
    for (int i = thread_; i < schedule.units * args_.rows * kQuads; i += kPersistentThreads) {
      const int pair = i / kQuads;
      const int local = QuotientOf(pair, args_.rows);
      const int row = pair - local * args_.rows;
      const ScheduledUnit unit = UnitAt(schedule, local);
      int place = 0;
      float factor = unit.side == 0 ? gemm.weights.multiplier : gemm.up_multiplier;
      if (of_experts && gates) {
        if ((Rows().task_rows[unit.copy] >> row & 1) == 0) continue;
        place = Rows().places[unit.copy][row] * gemm.copy_strips * kStripOutputs;
        const PersistentExpert& expert = tables_.Chosen(unit.copy);
        factor = unit.side == 0 ? expert.gate_multiplier : expert.up_multiplier;
      } else if (of_experts) {
        factor = 1.0f;  // In the inputs.
      }
      if (normalized) factor *= Rows().factors[row];
      const int output = i % kQuads * 4;
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
      for (int warp = unit.first_warp; warp < unit.end_warp; ++warp) {
        AddTo(sum, SumAt(local, warp, row, output));
      }
      const float4 bias = BiasOf(layer, gemm, unit, row, output, of_experts, gates);
      PublishQuad(words + unit.word + row * gemm.columns + place + output,
                  ScaledAdd(sum, factor, bias), tag);
    }
    // Between attentions a buffer has the words of the same phases in every launch.
    if constexpr (!IsBetween(kForm)) PublishRest(gemm, which, words, tag);
  }

 private:
  /// Words that other layers have are written in every layer, so that no tag is one of long ago.
  MARLIN_DEVICE void PublishRest(const PhaseGemm& gemm, int which, uint32_t* words,
                                 uint32_t tag) const {
#pragma unroll 1
    for (int i = gemm.splits * args_.rows * gemm.columns +
                 static_cast<int>(blockIdx.x) * kPersistentThreads + thread_;
         i < args_.exchange.phase_words[which];
         i += static_cast<int>(gridDim.x) * kPersistentThreads) {
      PublishWord(words + i, 0.0f, tag);
    }
  }

  /// Four sums of a warp's tiles of a unit.
  MARLIN_DEVICE float4 SumAt(int unit, int warp, int row, int output) const {
    return *reinterpret_cast<const float4*>(
        SumsOf(args_) + ((unit + warp) * args_.rows + row) * kRowSumFloats + output);
  }

  /// The biases of four outputs of a unit, from `output` on.
  MARLIN_DEVICE float4 BiasOf(const PersistentLayer& layer, const PhaseGemm& gemm,
                              const ScheduledUnit& unit, int row, int output, bool of_experts,
                              bool gates) const {
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    const int n = static_cast<int>(unit.output) + output;
    if (unit.first_split == 0 || n >= gemm.n) return sum;
    if (!of_experts || gates) {
      const float* bias = of_experts ? tables_.Chosen(unit.copy).gate_bias : gemm.bias;
      if (bias != nullptr) sum = *reinterpret_cast<const float4*>(bias + unit.side * gemm.n + n);
      return sum;
    }
#pragma unroll 1
    for (int place = 0; place < args_.router.selected(); ++place) {
      const int at = row * kMostChosenExperts + place;
      const float* const bias = ExpertAt(Rows().chosen[at]).down_bias;
      if (bias == nullptr) continue;
      const float4 v = *reinterpret_cast<const float4*>(bias + n);
      const float weight = Scratch().weights[at];
      sum = ScaledAdd(v, weight, sum);
    }
    return sum;
  }
  MARLIN_DEVICE const PersistentExpert& ExpertAt(int number) const {
    return reinterpret_cast<const PersistentExpert*>(Memory() + args_.shared.experts)[number];
  }
};

}  // namespace marlin::cuda
