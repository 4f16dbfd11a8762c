// Prefill and decode speed of a model, beside the time of its GEMMs alone.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/gemm.h"
#include "bench/timer.h"
#include "marlin/model.h"
#include "marlin/status.h"
#include "model/step_timer.h"

namespace marlin::bench {

inline constexpr int64_t kMaxBatch = 4096;

struct ModelBenchOptions {
  int64_t prompt_tokens = 512;
  int64_t new_tokens = 64;
  int64_t batch = 1;     ///< Sequences per Forward call.
  bool profile = false;  ///< Also times every operation.
};

/// The operations of one kind in a Forward call.
struct ProfileRow {
  StepPart part = StepPart::kEmbed;
  int64_t count = 0;
  double seconds = 0;  ///< All of them, the median of several calls.
};

/// Prefill, per Forward call, or decoding, per step of calls of up to eight steps.
struct ModelPhase {
  const char* name = "";
  int64_t tokens = 0;  ///< All sequences together.
  Timing timing;
  /// The model's GEMMs of the same shapes and nothing else, measured in turn with the above: the
  /// time that `bench gemm` predicts. Experts share the tokens evenly.
  Timing products;
  double weight_bytes = 0;  ///< Prepared weights, read once.
  double operations = 0;    ///< FLOP of the GEMMs.
  /// Each operation timed alone, without those beside it; in the order of a step. Work that the
  /// device records overlaps, so that their sum is more than the call takes.
  std::vector<ProfileRow> profile;

  double TokensPerSecond() const { return static_cast<double>(tokens) / timing.median; }
  double ProfileSeconds() const;
  double ProductsFraction() const { return products.median / timing.median; }
};

/// The profiles of phases as tables.
std::string ProfileText(const std::vector<ModelPhase>& phases);
/// {"seconds", "operations": [{"operation", "count", "seconds", "share"}]}
nlohmann::ordered_json ProfileJson(const ModelPhase& phase);

/// Errors: kInvalidArgument naming the option that the model's context is too short for.
Status CheckModelBench(const ModelInfo& model, const ModelBenchOptions& options);

/// Times prefill of empty sequences, and decoding of the new tokens that follow such a prompt.
/// Errors: kInvalidArgument naming the option out of range, those of Model::Forward.
Result<std::vector<ModelPhase>> BenchModel(const Model& model, const ModelBenchOptions& options);

}  // namespace marlin::bench
