#include "engine/batch/batch_drafts.h"

#include <algorithm>

#include "base/macros.h"
#include "engine/kv_cache.h"

namespace marlin {
namespace {

/// Rows of a pass with drafts, at most: with more rows products are no longer bound by reading the
/// weights, and drafts that fail would delay all texts.
constexpr int64_t kMostRowsWithDrafts = 32;

/// How many tokens of a text may be guessed for the next pass.
int64_t MostDrafts(const Model& model, const BatchText& text, int64_t room) {
  if (text.constrained || text.left() > 1) return 0;
  const int64_t fed = text.sequence->length() + 1;
  const int64_t wanted = text.options->max_tokens - std::ssize(text.generated.token_ids);
  return std::min({room, model.info().max_positions - fed, wanted - 1});
}

/// A layer that drafts is fed whether or not it may guess. Without memory it guesses nothing.
Status GuessDrafts(int64_t most, BatchText* text) {
  if (!text->layer) {
    if (most > 0) text->drafts = text->lookup->Guess(text->tokens, most);
    return {};
  }
  if (most <= 0) {
    const Status followed = text->layer->Follow(text->tokens);
    return followed.code() == Code::kOutOfMemory ? Status() : followed;
  }
  Result<std::vector<int32_t>> guess = text->layer->Guess(text->tokens, most);
  if (!guess.ok()) {
    return guess.status().code() == Code::kOutOfMemory ? Status() : guess.status();
  }
  text->drafts = *std::move(guess);
  return {};
}

}  // namespace

Status AddDrafts(const Model& model, std::span<BatchText* const> running, int64_t room) {
  room = std::min(room, kMostRowsWithDrafts - std::ssize(running));
  for (BatchText* const text : running) {
    if (!text->lookup && !text->layer) continue;
    MARLIN_RETURN_IF_ERROR(GuessDrafts(MostDrafts(model, *text, room), text));
    if (text->drafts.empty()) continue;
    KvCache& cache = text->sequence->state()->cache;
    const int64_t fed = text->sequence->length() + 1;
    if (!cache.Reserve(cache.length(), fed + std::ssize(text->drafts)).ok()) {
      text->drafts.clear();
      room = 0;
      continue;
    }
    room -= std::ssize(text->drafts);
  }
  return {};
}

}  // namespace marlin
