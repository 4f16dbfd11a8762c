// The results of a phase in the persistent kernel with rows: the sums of the CTA's units.
#pragma once

#include "backends/cuda/persistent/persistent_rows_part.cuh"

namespace marlin::cuda {

/// The sums of a phase. A thread has four outputs of a unit and a row at a time.
class RowsOutputs : private RowsPart {
 public:
  MARLIN_DEVICE RowsOutputs(const PersistentArguments& args, int phase, const Schedule& schedule)
      : RowsPart(args), phase_(phase), schedule_(schedule) {}

  /// Place of outputs and all but their sums, which are not there yet.
  struct Output {
    int word = -1;  ///< Where they go, of the phase's words; negative: nowhere.
    int sums = 0;   ///< Where the first warp's sums are, in floats.
    int warps = 0;  ///< That have tiles of the unit.
    float factor = 1.0f;
    float4 bias = {0.0f, 0.0f, 0.0f, 0.0f};
  };

  /// The thread's first outputs.
  template <PersistentForm kForm>
  MARLIN_DEVICE Output FindFirst() const {
    return Find<kForm>(FirstOutput());
  }

  /// Adds the warps' sums and publishes them. `output`: FindFirst's. Called by all threads that
  /// compute, after a barrier.
  template <PersistentForm kForm>
  MARLIN_DEVICE void Publish(Output output) const {
    const int which = phase_ % kPhases;
    const uint32_t tag = Tag(phase_ / kPhases);
    uint32_t* const words = Words(phase_ / kPhases) + args_.exchange.phases[which];
    // Further outputs are found one after another: few phases have any.
#pragma unroll 1
    for (int i = FirstOutput(); i < Outputs(); output = Find<kForm>(i)) {
      i += kPersistentThreads;
      if (output.word < 0) continue;
      PublishQuad(words + output.word, ScaledAdd(Sum(output), output.factor, output.bias), tag);
    }
    // Between attentions a buffer has the words of the same phases in every launch.
    if constexpr (!IsBetween(kForm)) PublishRest(tables_.GemmOf(phase_), which, words, tag);
  }

 private:
  static constexpr int kQuads = kStripOutputs / 4;

  MARLIN_DEVICE int Outputs() const { return schedule_.units * args_.rows * kQuads; }
  /// The first warp has the last ones: it shares its scheduler with a warp that copies, and is the
  /// last one to be done with its tiles.
  MARLIN_DEVICE int FirstOutput() const {
    return (thread_ + kPersistentThreads - 32) % kPersistentThreads;
  }

  template <PersistentForm kForm>
  MARLIN_DEVICE Output Find(int number) const {
    Output found;
    if (number >= Outputs()) return found;
    const PersistentLayer& layer = LayerOf(phase_);
    const PhaseGemm& gemm = tables_.GemmOf(phase_);
    const int which = phase_ % kPhases;
    const bool of_experts = layer.experts != nullptr && which >= static_cast<int>(Phase::kGates);
    const bool gates = which == static_cast<int>(Phase::kGates);
    const bool of_queries =
        IsBetween(kForm) && which == static_cast<int>(Phase::kOut) && phase_ != args_.first_phase;
    const bool normalized = gates || which == static_cast<int>(Phase::kQkv) || of_queries;
    const int pair = number / kQuads;
    const int local = QuotientOf(pair, args_.rows);
    const int row = pair - local * args_.rows;
    const ScheduledUnit unit = UnitAt(schedule_, local);
    int place = 0;
    found.factor = unit.side == 0 ? gemm.weights.multiplier : gemm.up_multiplier;
    if (of_experts && gates) {
      if ((Rows().task_rows[unit.copy] >> row & 1) == 0) return found;
      place = Rows().places[unit.copy][row] * gemm.copy_strips * kStripOutputs;
      const PersistentExpert& expert = tables_.Chosen(unit.copy);
      found.factor = unit.side == 0 ? expert.gate_multiplier : expert.up_multiplier;
    } else if (of_experts) {
      found.factor = 1.0f;  // In the inputs.
    }
    if (normalized) found.factor *= Rows().factors[row];
    const int output = number % kQuads * 4;
    found.word = static_cast<int>(unit.word) + row * gemm.columns + place + output;
    found.sums = ((local + unit.first_warp) * args_.rows + row) * kRowSumFloats + output;
    found.warps = unit.end_warp - unit.first_warp;
    found.bias = BiasOf(layer, gemm, unit, row, output, of_experts, gates);
    return found;
  }

  MARLIN_DEVICE float4 Sum(const Output& output) const {
    constexpr int kAtOnce = 4;
    const int stride = args_.rows * kRowSumFloats;
    const float* const sums = SumsOf(args_) + output.sums;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int first = 0; first < output.warps; first += kAtOnce) {
      float4 parts[kAtOnce] = {};
#pragma unroll
      for (int w = 0; w < kAtOnce; ++w) {
        if (first + w >= output.warps) break;
        parts[w] = *reinterpret_cast<const float4*>(sums + (first + w) * stride);
      }
#pragma unroll
      for (const float4& part : parts) AddTo(sum, part);
    }
    return sum;
  }

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
    if (layer.down_biases == 0) return sum;
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

  int phase_;
  const Schedule& schedule_;
};

}  // namespace marlin::cuda
