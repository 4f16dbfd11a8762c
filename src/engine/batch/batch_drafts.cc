#include "engine/batch/batch_drafts.h"

#include <algorithm>
#include <utility>

#include "base/macros.h"
#include "base/seconds_since.h"
#include "engine/batch/batch_states.h"
#include "engine/kv_cache.h"

namespace marlin {
namespace {

/// How many tokens of a text may be guessed for the next pass.
int64_t MostDrafts(const Model& model, const BatchText& text, int64_t room) {
  if (text.constrained || text.left() > 1) return 0;
  const int64_t fed = text.sequence->length() + 1;
  const int64_t wanted = text.options->max_tokens - std::ssize(text.generated.token_ids);
  const int64_t most = std::min({room, model.info().max_positions - fed, wanted - 1});
  return PieceToState(model, text, 1 + most) - 1;
}

/// Whether a greedy guess is what the text's sampler would choose.
bool IsGreedy(const SamplingOptions& options) {
  return options.temperature == 0 && options.repetition_penalty == 1 &&
         options.presence_penalty == 0 && options.frequency_penalty == 0;
}

/// The text goes on without a guess where the draft has no memory or says nothing that is finite.
bool IsHarmless(Code code) { return code == Code::kOutOfMemory || code == Code::kNonFiniteInput; }

class PassDrafts {
 public:
  PassDrafts(const Model& model, const BatchSlots& slots, std::span<BatchText* const> running,
             int64_t room, DraftCosts* costs)
      : model_(model), slots_(slots), room_(room), costs_(*costs) {
    for (const BatchText* const text : running) {
      if (text->piece == 0 || text->left() > 1) continue;
      ++pass_.rows;
      ++pass_.tokens;
    }
  }

  Status Add(BatchText& text) {
    if (text.drafter == nullptr) return {};
    Status status = Guess(text);
    if (IsHarmless(status.code())) status = Status();
    if (!status.ok() || text.drafts.empty()) return status;
    KvCache& cache = text.sequence->state()->cache;
    const int64_t fed = text.sequence->length() + 1;
    const int64_t drafts = std::ssize(text.drafts);
    if (!cache.Reserve(cache.length(), fed + drafts, drafts).ok()) {
      text.drafts.clear();
      room_ = 0;
      return {};
    }
    room_ -= drafts;
    pass_.rows += drafts;
    pass_.tokens += text.control->ExpectedTokens(drafts) - 1;
    return {};
  }

 private:
  Status Guess(BatchText& text) {
    const int64_t most = MostDrafts(model_, text, room_);
    // The text itself is a row and a token of the pass.
    const DraftedPass others{pass_.rows - 1, pass_.tokens - 1, pass_.seconds};
    const int64_t wanted = most <= 0 ? 0 : text.control->Choose(costs_, others, most);
    if (wanted == 0) return text.drafter->Follow(text.tokens, text.sequence->length());
    std::vector<uint8_t> sampler;
    if (text.slot >= 0 && text.drafter->draws() && !IsGreedy(text.options->sampling)) {
      MARLIN_ASSIGN_OR_RETURN(sampler, slots_.Save(text));
    }
    const auto start = std::chrono::steady_clock::now();
    MARLIN_ASSIGN_OR_RETURN(text.drafts, text.drafter->Guess(text.tokens, wanted, sampler));
    const double seconds = SecondsSince(start);
    costs_.AddGuess(std::ssize(text.drafts), seconds);
    pass_.seconds += seconds;
    return {};
  }

  const Model& model_;
  const BatchSlots& slots_;
  int64_t room_;
  DraftCosts& costs_;
  DraftedPass pass_;
};

}  // namespace

Status AddDrafts(const Model& model, const BatchSlots& slots, std::span<BatchText* const> running,
                 int64_t room, DraftCosts* costs) {
  PassDrafts drafts(model, slots, running, room, costs);
  for (BatchText* const text : running) MARLIN_RETURN_IF_ERROR(drafts.Add(*text));
  return {};
}

}  // namespace marlin
