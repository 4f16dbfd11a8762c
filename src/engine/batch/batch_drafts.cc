#include "engine/batch/batch_drafts.h"

#include <algorithm>

#include "engine/kv_cache.h"

namespace marlin {
namespace {

/// Rows of a pass with drafts, at most: with more rows products are no longer bound by reading the
/// weights, and drafts that fail would delay all texts.
constexpr int64_t kMostRowsWithDrafts = 32;

}  // namespace

void AddDrafts(const Model& model, std::span<BatchText* const> running, int64_t room) {
  room = std::min(room, kMostRowsWithDrafts - std::ssize(running));
  for (BatchText* const text : running) {
    if (!text->lookup || text->constrained || text->left() > 1) continue;
    const int64_t fed = text->sequence->length() + 1;
    const int64_t wanted = text->options->max_tokens - std::ssize(text->generated.token_ids);
    const int64_t most = std::min({room, model.info().max_positions - fed, wanted - 1});
    if (most <= 0) continue;
    text->drafts = text->lookup->Guess(text->tokens, most);
    KvCache& cache = text->sequence->state()->cache;
    if (!cache.Reserve(cache.length(), fed + std::ssize(text->drafts)).ok()) {
      text->drafts.clear();
      return;
    }
    room -= std::ssize(text->drafts);
  }
}

}  // namespace marlin
