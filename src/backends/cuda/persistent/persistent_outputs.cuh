// The results of a phase in the persistent kernel with one row: the sums of the CTA's units.
#pragma once

#include "backends/cuda/persistent/persistent_exchange.cuh"
#include "backends/cuda/persistent/persistent_tiles.cuh"

namespace marlin::cuda {

/// The outputs of a CTA in a phase, of which a thread publishes one at most.
class PersistentOutputs {
 public:
  MARLIN_DEVICE PersistentOutputs(const PersistentArguments& args, int phase,
                                  const Schedule& schedule)
      : args_(args), tables_{args}, phase_(phase), schedule_(schedule) {}

  /// Place of an output: known before the phase's inputs are there.
  struct Published {
    int to = -1;         ///< Which of the exchanges' words; -1: nothing.
    uint32_t warps = 0;  ///< A bit for every warp that has tiles of it, then the tag.
  };
  /// Rest of an output, apart from its sum and its norm.
  struct Finish {
    float factor = 1.0f;
    float bias = 0.0f;
  };

  /// Called by all threads that compute, as the other functions. Also publishes the words of the
  /// phase that other layers have: every word is written in every layer, so that no tag is one of
  /// long ago.
  template <PersistentForm kForm>
  MARLIN_DEVICE Published FindPublished() const {
    // Between attentions a buffer has the words of the same phases in every launch.
    if constexpr (kForm != PersistentForm::kBetween) PublishRest();
    Published published;
    if (Local() >= schedule_.units) return published;
    const ScheduledUnit& unit = UnitAt(schedule_, Local());
    published.to = static_cast<int>(Clock() & 1) * args_.exchange.words +
                   args_.exchange.phases[phase_ % kPhases] + static_cast<int>(unit.word) + Output();
    published.warps = unit.warps | TagOf(Clock()) << kPersistentWarps;
    return published;
  }

  MARLIN_DEVICE Finish FindFinish() const {
    Finish finish;
    if (Local() >= schedule_.units) return finish;
    const PersistentLayer& layer = tables_.LayerOf(phase_ / kPhases);
    const auto phase = static_cast<Phase>(phase_ % kPhases);
    const PhaseGemm& gemm = tables_.GemmOf(phase_);
    const ScheduledUnit unit = UnitAt(schedule_, Local());
    const int n = static_cast<int>(unit.output) + Output();
    const bool adds_bias = unit.first_split != 0 && n < gemm.n;
    const float* bias = gemm.bias;
    if (layer.experts == nullptr || phase < Phase::kGates) {
      finish.factor = unit.side == 0 ? gemm.weights.multiplier : gemm.up_multiplier;
    } else if (phase == Phase::kGates) {
      const PersistentExpert& expert = tables_.Chosen(unit.copy);
      finish.factor = unit.side == 0 ? expert.gate_multiplier : expert.up_multiplier;
      bias = expert.gate_bias;
    } else if (adds_bias) {
      // The multipliers are in the inputs.
      if (layer.down_biases != 0) finish.bias = BiasOfDowns(n);
    }
    if (bias != nullptr && adds_bias) finish.bias += bias[unit.side * gemm.n + n];
    return finish;
  }

  /// Adds the warps' sums of the CTA's units and publishes them, with their biases.
  MARLIN_DEVICE void Publish(const Published& published, const Finish& finish, float norm) const {
    if (published.to < 0) return;
    const float* const sums = SumsOf(args_) + Local() * kPersistentWarps * kStripOutputs + Output();
    const float sum = SumOfWarps(published.warps, sums);
    PublishWord(args_.words + published.to, __fmaf_rn(sum, finish.factor * norm, finish.bias),
                published.warps >> kPersistentWarps);
  }

 private:
  static MARLIN_DEVICE int Thread() { return static_cast<int>(threadIdx.x); }
  /// The thread's unit of the CTA's, and its output of the unit's.
  static MARLIN_DEVICE int Local() { return static_cast<int>(threadIdx.x / kStripOutputs); }
  static MARLIN_DEVICE int Output() { return static_cast<int>(threadIdx.x % kStripOutputs); }

  MARLIN_DEVICE uint32_t Clock() const { return tables_.Scratch().clock + phase_ / kPhases; }

  MARLIN_DEVICE void PublishRest() const {
    const int phase = phase_ % kPhases;
    const PhaseGemm& gemm = tables_.GemmOf(phase_);
    const int used = gemm.splits * gemm.columns;
    if (used == args_.exchange.phase_words[phase]) return;
    uint32_t* const words =
        args_.words + (Clock() & 1) * args_.exchange.words + args_.exchange.phases[phase];
#pragma unroll 1
    for (int i = used + static_cast<int>(blockIdx.x) * kPersistentThreads + Thread();
         i < args_.exchange.phase_words[phase];
         i += static_cast<int>(gridDim.x) * kPersistentThreads) {
      PublishWord(words + i, 0.0f, TagOf(Clock()));
    }
  }

  /// The weighted biases of the selected experts' outputs.
  MARLIN_DEVICE float BiasOfDowns(int n) const {
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < args_.router.selected(); ++i) {
      const float* const bias = tables_.Chosen(i).down_bias;
      if (bias != nullptr) sum += tables_.Scratch().weights[i] * bias[n];
    }
    return sum;
  }

  const PersistentArguments& args_;
  const Tables tables_;
  int phase_;
  const Schedule& schedule_;
};

}  // namespace marlin::cuda
