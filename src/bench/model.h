// Prefill and decode speed of a model, and the time of its GEMMs alone.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/gemm.h"
#include "bench/timer.h"
#include "engine/step_timer.h"
#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin::bench {

inline constexpr int64_t kMaxBatch = 4096;

/// One prompt, and the numbers of tokens that are generated after it.
struct ModelBenchOptions {
  int64_t prompt_tokens = 512;  ///< 0: no prefill; generation begins with an empty cache.
  std::vector<int64_t> new_tokens = {64};  ///< A phase for each; 0: none.
  int64_t batch = 1;                       ///< Sequences per Forward call.
  bool profile = false;                    ///< Also times every operation.
  TimingOptions timing = {};               ///< How long to measure each phase.
};

/// The operations of one kind in a Forward call.
struct ProfileRow {
  StepPart part = StepPart::kEmbed;
  int64_t count = 0;
  double seconds = 0;  ///< All of them, the median of several calls.
};

/// Prefill, per Forward call, or decoding, per step of calls of up to eight steps.
struct ModelPhase {
  const char* name = "";  ///< "prefill" or "decode".
  int64_t prompt_tokens = 0;
  int64_t new_tokens = 0;  ///< 0 for a prefill.
  int64_t batch = 1;
  int64_t tokens = 0;  ///< Tokens per call or step, all sequences together.
  Timing timing;
  /// The model's GEMMs of the same shapes and nothing else, measured in turn with the above: the
  /// time that `bench gemm` predicts. Experts share the tokens evenly.
  Timing products;
  double weight_bytes = 0;  ///< Prepared weights, read once.
  double operations = 0;    ///< FLOP of the GEMMs.
  /// Each operation timed alone, without the operations around it; in the order of a step. Work
  /// that the device records overlaps, so that their sum is more than the call takes.
  std::vector<ProfileRow> profile;

  /// As llama-bench names it: "pp512", "tg64", "tg64 @ d512" after a prompt of 512 tokens.
  std::string Test() const;
  /// The roofline time, of weights read once or of the GEMMs' arithmetic, over the measured time.
  double Fraction(const MachineCeilings& ceilings) const;
  double TokensPerSecond() const { return static_cast<double>(tokens) / timing.median; }
  double ProfileSeconds() const;
  double ProductsFraction() const { return products.median / timing.median; }
};

/// A table of phases.
std::string ModelText(const std::vector<ModelPhase>& phases, const MachineCeilings& ceilings);
/// One row of "results"; with a profile if the phase has one.
nlohmann::ordered_json ModelJson(const ModelPhase& phase, const MachineCeilings& ceilings);
/// The profiles of phases as tables.
std::string ProfileText(const std::vector<ModelPhase>& phases);

/// Errors: kInvalidArgument naming the option that the model's context is too short for.
Status CheckModelBench(const ModelInfo& model, const ModelBenchOptions& options);

/// Times prefill of empty sequences, and decoding of the new tokens that follow such a prompt.
/// Errors: kInvalidArgument naming the option out of range, from Model::Forward.
Result<std::vector<ModelPhase>> BenchModel(const Model& model, const ModelBenchOptions& options);

}  // namespace marlin::bench
