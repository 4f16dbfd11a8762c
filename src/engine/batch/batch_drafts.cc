#include "engine/batch/batch_drafts.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "base/seconds_since.h"
#include "engine/batch/batch_states.h"
#include "engine/kv_cache.h"

namespace marlin {
namespace {

/// How many tokens of a text may be guessed for the next pass.
int64_t MostDrafts(const Model& model, const BatchText& text, int64_t room) {
  if (text.piece == 0 || text.constrained || text.left() > 1) return 0;
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

/// The texts go on without a guess where the draft has no memory or says nothing that is finite.
bool IsHarmless(Code code) { return code == Code::kOutOfMemory || code == Code::kNonFiniteInput; }

Status UnlessHarmless(const Status& status) {
  return IsHarmless(status.code()) ? Status() : status;
}

/// Lets the draft of a text without guesses see what the model was fed.
Status Follow(BatchText& text, DraftCosts* costs) {
  const auto start = std::chrono::steady_clock::now();
  const Result<int64_t> fed = text.drafter->Follow(text.tokens, text.sequence->length());
  if (!fed.ok()) return UnlessHarmless(fed.status());
  costs->AddFollow(*fed, SecondsSince(start));
  return {};
}

/// The guesses of a pass, once it is chosen how many there are.
class PassDrafts {
 public:
  PassDrafts(const BatchSlots& slots, DraftCosts* costs) : slots_(slots), costs_(*costs) {}

  /// Guesses tokens of a text together with others that have the same draft.
  void Add(BatchText& text, int64_t guesses) {
    Group& group = groups_[text.drafter->draft()];
    group.texts.push_back(&text);
    group.requests.push_back({text.drafter.get(), text.tokens, guesses});
  }

  /// Gives a text its guesses, or as many as there is memory for, and takes their pages.
  void Take(BatchText& text, std::vector<int32_t> guess) {
    text.drafts = std::move(guess);
    KvCache& cache = text.sequence->state()->cache;
    while (has_memory_ && !text.drafts.empty()) {
      const int64_t drafts = std::ssize(text.drafts);
      if (cache.Reserve(cache.length(), cache.length() + 1 + drafts, drafts).ok()) return;
      text.drafts.resize(text.drafts.size() / 2);
      has_memory_ = !text.drafts.empty();
    }
    text.drafts.clear();
    cache.DropGuesses();
  }

  Status GuessTogether() {
    for (auto& [draft, group] : groups_) MARLIN_RETURN_IF_ERROR(GuessTogether(group));
    return {};
  }

 private:
  /// Texts of the same draft.
  struct Group {
    std::vector<BatchText*> texts;
    std::vector<GuessRequest> requests;
  };

  Status GuessTogether(Group& group) {
    std::vector<std::vector<uint8_t>> samplers(group.texts.size());
    for (size_t i = 0; i < samplers.size(); ++i) {
      const BatchText& text = *group.texts[i];
      if (text.slot < 0 || IsGreedy(text.options->sampling)) continue;
      Result<std::vector<uint8_t>> sampler = slots_.Save(text);
      MARLIN_RETURN_IF_ERROR(UnlessHarmless(sampler.status()));
      if (!sampler.ok()) continue;
      samplers[i] = *std::move(sampler);
      group.requests[i].sampler = samplers[i];
    }
    MARLIN_RETURN_IF_ERROR(Guess(group.requests));
    for (size_t i = 0; i < samplers.size(); ++i) {
      BatchText& text = *group.texts[i];
      Take(text, std::move(group.requests[i].guess));
      if (text.drafts.empty()) MARLIN_RETURN_IF_ERROR(Follow(text, &costs_));
    }
    return {};
  }

  Status Guess(std::span<GuessRequest> requests) {
    const auto start = std::chrono::steady_clock::now();
    MARLIN_RETURN_IF_ERROR(UnlessHarmless(requests.front().drafter->GuessAll(requests)));
    int64_t most = 0;
    for (const GuessRequest& request : requests) most = std::max(most, std::ssize(request.guess));
    costs_.AddGuess(most, SecondsSince(start));
    return {};
  }

  const BatchSlots& slots_;
  DraftCosts& costs_;
  bool has_memory_ = true;  ///< For guesses.
  std::map<const Model::Impl*, Group> groups_;
};

}  // namespace

Status AddDrafts(const Model& model, const BatchSlots& slots, std::span<BatchText* const> running,
                 int64_t room, DraftCosts* costs) {
  int64_t rows = 0;
  std::vector<BatchText*> texts;
  std::vector<DraftChoice> choices;
  std::vector<GuessRequest> requests;
  for (BatchText* const text : running) {
    if (text->piece > 0 && text->left() == 1) ++rows;
    if (text->drafter == nullptr) continue;
    const int64_t most = std::min(MostDrafts(model, *text, room), text->control->most());
    GuessRequest& request = requests.emplace_back(
        GuessRequest{.drafter = text->drafter.get(), .tokens = text->tokens, .most = most});
    texts.push_back(text);
    choices.push_back({&*text->control, most, text->drafter->draft() != nullptr});
    // Without a call of a draft a guess costs nothing, so that it is known how many there are.
    if (choices.back().has_draft || most <= 0) continue;
    MARLIN_RETURN_IF_ERROR(text->drafter->GuessAll({&request, 1}));
    choices.back().most = std::ssize(request.guess);
  }
  ChooseGuesses(*costs, rows, room, choices);
  PassDrafts drafts(slots, costs);
  for (size_t i = 0; i < texts.size(); ++i) {
    const int64_t guesses = choices[i].guesses;
    if (!choices[i].has_draft) {
      requests[i].guess.resize(static_cast<size_t>(guesses));
      drafts.Take(*texts[i], std::move(requests[i].guess));
    } else if (guesses > 0) {
      drafts.Add(*texts[i], guesses);
    } else if (choices[i].gives_up) {
      texts[i]->drafter.reset();
    } else {
      MARLIN_RETURN_IF_ERROR(Follow(*texts[i], costs));
    }
  }
  return drafts.GuessTogether();
}

}  // namespace marlin
