#include "engine/batch/batch_states.h"

#include <algorithm>

#include "engine/kv_cache.h"
#include "engine/model_impl.h"

namespace marlin {
namespace {

/// Pages of a text between two states that it publishes: a state is as large as several pages.
constexpr int64_t kPagesPerState = 16;

/// The first length after `length` at which a text publishes its states: where the last whole page
/// of its prompt ends, and every kPagesPerState pages. INT64_MAX: none.
int64_t NextState(const PagePool& pool, const BatchText& text, int64_t length) {
  if (!text.salt || !pool.HasStates()) return INT64_MAX;
  const int64_t page = pool.page_tokens();
  const int64_t of_prompt = (std::ssize(text.prompt) - 1) / page * page;
  const int64_t next = (length / (kPagesPerState * page) + 1) * kPagesPerState * page;
  return of_prompt > length ? std::min(of_prompt, next) : next;
}

}  // namespace

int64_t PieceToState(const Model& model, const BatchText& text, int64_t piece) {
  const int64_t length = text.sequence->length();
  return std::min(piece, NextState(*Internals::Impl(model).pool, text, length) - length);
}

void PublishPages(const Model& model, BatchText* text) {
  KvCache& cache = text->sequence->state()->cache;
  const int64_t length = cache.length();
  const PagePool& pool = *Internals::Impl(model).pool;
  cache.Publish(text->tokens, length > 0 && NextState(pool, *text, length - 1) == length);
}

}  // namespace marlin
