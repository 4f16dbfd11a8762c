// One prompt of a continuous batch, and its continuation.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/speculation/draft_control.h"
#include "engine/speculation/drafter.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/scheduler.h"
#include "marlin/status.h"

namespace marlin {

/// A text of a ContinuousBatch, owned by the batch's user, who keeps prompt and options.
struct BatchText {
  using Clock = std::chrono::steady_clock;

  std::span<const int32_t> prompt;
  const GenerateOptions* options = nullptr;
  std::span<const int32_t> stops;  ///< Token ids.
  /// Shares the pages of its beginning with other texts of this salt; empty: with none.
  std::optional<std::string_view> salt;
  bool constrained = false;  ///< Samples each token only with a mask.
  /// The mask of the next token: bit i of word i / 32 allows token i. Empty: none yet.
  std::vector<uint32_t> allowed;
  int64_t logprobs = -1;         ///< As Request::logprobs.
  bool prompt_logprobs = false;  ///< As Request::prompt_logprobs; excludes a salt.
  /// Guesses tokens, with `control`; null: none are guessed.
  std::unique_ptr<Drafter> drafter;
  std::optional<DraftControl> control;
  /// Begins the prompt, and gets what the text was fed when it has ended; null: none does.
  Sequence* given = nullptr;
  Generated generated;
  /// Log-probabilities of the prompt's tokens so far, but the first; the observer takes them.
  std::vector<TokenLogprobs> of_prompt;
  bool ended = false;
  Status error;                            ///< Why it ended, if not for generated.stop_reason.
  int64_t cached_tokens = 0;               ///< Tokens of the prompt that were not fed at first.
  std::optional<Clock::time_point> start;  ///< When it ran first.
  bool put_back = false;                   ///< At least once.
  /// The sampler state of a text that was put back; empty: not yet sampled from.
  std::vector<uint8_t> sampler;

  // While it runs:
  std::optional<Sequence> sequence;
  std::vector<int32_t> tokens;  ///< The prompt and the generated tokens.
  bool alone = false;           ///< No other has run since it started.
  int64_t slot = -1;            ///< Where its sampler state is; -1: it has none yet.
  int64_t piece = 0;            ///< How many tokens the next pass feeds.
  std::vector<int32_t> drafts;  ///< Guesses that it feeds after them.

  /// Tokens not fed yet; 1 for a text that decodes.
  int64_t left() const { return static_cast<int64_t>(tokens.size()) - sequence->length(); }
  /// Those that may be fed: not the last one of a text that waits for its mask.
  int64_t ready() const { return left() - (constrained && allowed.empty() ? 1 : 0); }
  bool reads_hidden() const { return drafter != nullptr && drafter->reads_hidden(); }
  bool samples() const { return piece == left(); }
  /// Whether a pass reports the log-probabilities of the tokens that it feeds.
  bool reports_prompt() const {
    return prompt_logprobs && generated.token_ids.empty() && prompt.size() > 1;
  }
  std::span<const int32_t> next() const {
    return std::span(tokens).subspan(static_cast<size_t>(sequence->length()),
                                     static_cast<size_t>(piece));
  }
};

/// Receives the news of a batch's texts, between passes and from the thread that runs them.
class BatchObserver {
 public:
  BatchObserver() = default;
  BatchObserver(const BatchObserver&) = delete;
  BatchObserver& operator=(const BatchObserver&) = delete;
  virtual ~BatchObserver() = default;
  /// A new token, the last of text.generated, and its log-probabilities, or null. Returning false
  /// ends the text.
  virtual bool Sampled(BatchText& text, int32_t token, const TokenLogprobs* logprobs) = 0;
  /// The text has ended, with text.error or for text.generated.stop_reason.
  virtual void Ended(BatchText& text) = 0;
};

}  // namespace marlin
