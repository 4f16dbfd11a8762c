// Generation with and without speculation, in turn.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/timer.h"
#include "marlin/model.h"
#include "marlin/speculation.h"
#include "marlin/status.h"

namespace marlin::bench {

struct SpeculationBenchOptions {
  std::vector<int32_t> prompt = {};
  int64_t new_tokens = 64;  ///< 2 or more.
  int64_t batch = 1;        ///< Texts at a time, of the same prompt.
  SpeculationOptions speculation = {};
  std::string draft = {};  ///< The value of --draft.
  TimingOptions timing = {};
};

/// Greedy texts of one prompt. Seconds are per token after the first, of all texts together.
struct SpeculatedRun {
  int64_t prompt_tokens = 0;
  int64_t new_tokens = 0;
  int64_t batch = 1;
  std::string draft = {};
  int64_t most = 0;  ///< Guesses for a pass, at most.
  bool always = false;
  Timing plain = {};
  Timing speculated = {};
  DraftCounts drafts = {};  ///< Guesses of all texts of the last round.
  int64_t tokens = 0;       ///< Tokens of these texts, without the first of each.
  bool same_tokens = true;  ///< In all rounds.

  double Speedup() const { return plain.median / speculated.median; }
  double Acceptance() const;
  /// Tokens of a text in a pass, on average.
  double TokensPerStep() const;
};

/// Errors: kInvalidArgument naming the option; as GenerateBatch.
Result<SpeculatedRun> BenchSpeculation(const Model& model, const SpeculationBenchOptions& options);

/// A prompt that repeats sixteen tokens.
std::vector<int32_t> RepetitivePrompt(int64_t tokens, int64_t vocab);

std::string SpeculationText(const std::vector<SpeculatedRun>& runs);
/// A row of "results", of the phase "speculate".
nlohmann::ordered_json SpeculationJson(const SpeculatedRun& run);

}  // namespace marlin::bench
