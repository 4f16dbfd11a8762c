#include "bench/speculation.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/macros.h"
#include "base/text_table.h"
#include "bench/document.h"
#include "marlin/generate.h"

namespace marlin::bench {
namespace {

constexpr int kLeastRounds = 3;

/// The texts of one kind.
class Texts {
 public:
  Texts(const Model& model, const SpeculationBenchOptions& options, SpeculationOptions speculation)
      : model_(model), prompts_(static_cast<size_t>(options.batch), options.prompt) {
    options_.max_tokens = options.new_tokens;
    options_.ignore_eos = true;
    options_.speculation = std::move(speculation);
  }

  Status Run() {
    MARLIN_ASSIGN_OR_RETURN(texts_, GenerateAll());
    double seconds = 0;
    for (const Generated& text : texts_) seconds = std::max(seconds, text.decode_seconds);
    seconds_.push_back(seconds / static_cast<double>(Tokens()));
    return {};
  }

  int64_t Tokens() const {
    int64_t tokens = 0;
    for (const Generated& text : texts_) tokens += std::ssize(text.token_ids) - 1;
    return std::max<int64_t>(tokens, 1);
  }
  bool SameAs(const Texts& other) const {
    return std::equal(
        texts_.begin(), texts_.end(), other.texts_.begin(), other.texts_.end(),
        [](const Generated& a, const Generated& b) { return a.token_ids == b.token_ids; });
  }
  DraftCounts Drafts() const {
    DraftCounts sum;
    for (const Generated& text : texts_) {
      sum.passes += text.drafts.passes;
      sum.drafted += text.drafts.drafted;
      sum.accepted += text.drafts.accepted;
    }
    return sum;
  }
  Timing Summary() const { return SummarizeSeconds(seconds_); }

 private:
  /// One text runs as `generate` runs it, which takes several steps per launch.
  Result<std::vector<Generated>> GenerateAll() const {
    if (prompts_.size() > 1) return GenerateBatch(model_, prompts_, {&options_, 1});
    MARLIN_ASSIGN_OR_RETURN(Generated text, Generate(model_, prompts_.front(), options_));
    return std::vector<Generated>{std::move(text)};
  }

  const Model& model_;
  std::vector<std::vector<int32_t>> prompts_;
  GenerateOptions options_;
  std::vector<Generated> texts_;
  std::vector<double> seconds_;
};

}  // namespace

double SpeculatedRun::Acceptance() const {
  return drafts.drafted == 0
             ? 0
             : static_cast<double>(drafts.accepted) / static_cast<double>(drafts.drafted);
}

double SpeculatedRun::TokensPerStep() const {
  // The guesses after a text's end were accepted, and are none of its tokens.
  const int64_t steps = std::max<int64_t>(tokens - drafts.accepted, 1);
  return static_cast<double>(tokens) / static_cast<double>(steps);
}

Result<SpeculatedRun> BenchSpeculation(const Model& model, const SpeculationBenchOptions& options) {
  if (options.new_tokens < 2) {
    return Invalid(fmt::format("--new-tokens: expected 2 or more with --speculate, got {}",
                               options.new_tokens));
  }
  Texts plain(model, options, {});
  Texts speculated(model, options, options.speculation);
  SpeculatedRun run{.prompt_tokens = std::ssize(options.prompt),
                    .new_tokens = options.new_tokens,
                    .batch = options.batch,
                    .draft = options.draft,
                    .most = options.speculation.tokens,
                    .always = options.speculation.always};
  const Stopwatch watch;
  for (int round = 0; round < kLeastRounds || watch.Seconds() < options.timing.min_seconds;
       ++round) {
    MARLIN_RETURN_IF_ERROR(plain.Run());
    MARLIN_RETURN_IF_ERROR(speculated.Run());
    run.same_tokens &= speculated.SameAs(plain);
    if (round > 0 && watch.Seconds() > options.timing.max_seconds) break;
  }
  run.plain = plain.Summary();
  run.speculated = speculated.Summary();
  run.drafts = speculated.Drafts();
  run.tokens = speculated.Tokens();
  return run;
}

std::vector<int32_t> RepetitivePrompt(int64_t tokens, int64_t vocab) {
  constexpr int64_t kPeriod = 16;
  std::vector<int32_t> prompt;
  for (int64_t i = 0; i < tokens; ++i) {
    prompt.push_back(static_cast<int32_t>((1 + i % kPeriod) * 7919 % vocab));
  }
  return prompt;
}

nlohmann::ordered_json SpeculationJson(const SpeculatedRun& run) {
  nlohmann::ordered_json row = {{"op", "model"},
                                {"phase", "speculate"},
                                {"draft", run.draft},
                                {"speculate", run.most},
                                {"always", run.always},
                                {"prompt_tokens", run.prompt_tokens},
                                {"new_tokens", run.new_tokens},
                                {"batch", run.batch}};
  row.update(TimingJson(run.speculated));
  row["tokens_per_second"] = 1 / run.speculated.median;
  row["plain_tokens_per_second"] = 1 / run.plain.median;
  row["speedup"] = run.Speedup();
  row["drafted"] = run.drafts.drafted;
  row["accepted"] = run.drafts.accepted;
  row["acceptance"] = run.Acceptance();
  row["tokens_per_step"] = run.TokensPerStep();
  row["same_tokens"] = run.same_tokens;
  return row;
}

std::string SpeculationText(const std::vector<SpeculatedRun>& runs) {
  if (runs.empty()) return {};
  Table table({"draft", "test", "batch", "tokens/s", "plain", "speedup", "accepted",
               "tokens per step", "same tokens"});
  for (const SpeculatedRun& run : runs) {
    table.AddRow({fmt::format("{}, {}{}", run.draft, run.always ? "" : "up to ", run.most),
                  fmt::format("tg{} @ d{}", run.new_tokens, run.prompt_tokens),
                  std::to_string(run.batch), fmt::format("{:.1f}", 1 / run.speculated.median),
                  fmt::format("{:.1f}", 1 / run.plain.median),
                  fmt::format("{:.2f}x", run.Speedup()),
                  fmt::format("{:.0f} %", 100 * run.Acceptance()),
                  fmt::format("{:.2f}", run.TokensPerStep()), run.same_tokens ? "yes" : "no"});
  }
  return "\n" + table.ToString();
}

}  // namespace marlin::bench
