#include "engine/batch/continuous_batch.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/macros.h"
#include "engine/batch/batch_drafts.h"
#include "engine/batch/batch_pass.h"
#include "engine/batch/batch_states.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
#include "model/placement.h"
#include "ops/device/device.h"

namespace marlin {
namespace {

using Clock = BatchText::Clock;

/// Bounds of BatchLimits::max_running = 0. Memory of the host has no limit that would put texts
/// back.
constexpr int64_t kDeviceBatch = 256;
constexpr int64_t kHostBatch = 32;

bool Stops(const BatchText& text, int32_t token) {
  return std::find(text.stops.begin(), text.stops.end(), token) != text.stops.end();
}

KvCache& CacheOf(BatchText& text) { return text.sequence->state()->cache; }

/// Takes the pages of tokens not fed yet that another text has published. Of a text that was put
/// back these may be its own, which are no cached tokens.
Status Adopt(BatchText& text) {
  if (!text.salt) return {};
  const int64_t adopted = CacheOf(text).Adopt(text.tokens, *text.salt);
  if (!text.put_back) text.cached_tokens += adopted;
  // A drafter that reads hidden states goes on after those that this text has none of.
  const bool skips = adopted > 0 && text.reads_hidden();
  return skips ? text.drafter->Restart(text.sequence->length()) : Status();
}

/// Takes the pages of a text's next piece, so that the memory runs out before a pass and not in it.
/// Guesses of the running texts give way.
Status Reserve(BatchText& text, std::span<BatchText* const> running) {
  KvCache& cache = CacheOf(text);
  Status status = cache.Reserve(cache.length(), cache.length() + text.piece);
  if (status.code() != Code::kOutOfMemory) return status;
  bool dropped = false;
  for (BatchText* const each : running) dropped |= CacheOf(*each).DropGuesses();
  return dropped ? cache.Reserve(cache.length(), cache.length() + text.piece) : status;
}

}  // namespace

/// The rest of a pass while it is planned.
struct ContinuousBatch::Budget {
  int64_t prefill = 0;  ///< Tokens of prompts.
  int64_t room = 0;     ///< Tokens beyond one of each running text.

  void Take(const BatchText& text) {
    if (text.piece == 0) return;
    if (text.left() > 1) prefill -= text.piece;
    room -= text.piece - 1;
  }
};

int64_t MaxRunning(const Model& model, int64_t wanted) {
  if (wanted == 0) wanted = ReadsHostMemory(model.device()) ? kHostBatch : kDeviceBatch;
  const int64_t pass_tokens = Internals::Impl(model.device()).backend().pass_tokens();
  return std::min({wanted, pass_tokens, kPassTokens});
}

Result<ContinuousBatch> ContinuousBatch::Make(const Model& model, const BatchLimits& limits,
                                              BatchObserver& observer) {
  MARLIN_ASSIGN_OR_RETURN(SamplerSlots samplers,
                          SamplerSlots::Make(model.device(), model.info().vocab_size,
                                             MaxRunning(model, limits.max_running)));
  return ContinuousBatch(model, limits, observer, BatchSlots(std::move(samplers)));
}

ContinuousBatch::ContinuousBatch(const Model& model, const BatchLimits& limits,
                                 BatchObserver& observer, BatchSlots slots)
    : model_(&model),
      observer_(&observer),
      pass_tokens_(Internals::Impl(model.device()).backend().pass_tokens()),
      prefill_tokens_(limits.prefill_tokens > 0 ? limits.prefill_tokens : pass_tokens_),
      interactive_(limits.interactive),
      slots_(std::move(slots)),
      // A pass is recorded the second time.
      costs_(Internals::Impl(model.device()).backend().records() ? 2 : 0) {}

void ContinuousBatch::Add(BatchText& text) {
  // The prompt alone may be wanted.
  if (text.options->max_tokens == 0 && !text.reports_prompt()) {
    return End(text, StopReason::kMaxTokens);
  }
  waiting_.push_back(&text);
}

// Within one pass, a call that fails has not advanced any sampler state.
Status ContinuousBatch::Step() {
  MARLIN_RETURN_IF_ERROR(Plan());
  const auto is_fed = [](const BatchText* text) { return text->piece > 0; };
  stalled_ = std::none_of(running_.begin(), running_.end(), is_fed);
  if (stalled_) return {};
  const std::vector<BatchText*> entered = slots_.Enter(running_);
  std::vector<SampledText> sampled;
  Status status = slots_.Fill(entered);
  if (status.ok()) status = RunTexts(*model_, slots_, running_, &costs_, &sampled);
  const bool is_empty = std::all_of(sampled.begin(), sampled.end(), [](const SampledText& text) {
    return text.tokens.empty() && text.error.ok();
  });
  if (status.code() == Code::kOutOfMemory && is_empty) {
    // The memory of activations: what is kept for later texts goes first, and fewer texts need
    // less.
    for (BatchText* const text : entered) slots_.Leave(*text);
    return Internals::Impl(*model_).pool->DropCached() ? Status() : PutBackNewest(status);
  }
  if (!status.ok() && status.code() != Code::kOutOfMemory) return status;
  for (BatchText* const text : entered) text->sampler.clear();
  for (const SampledText& each : sampled) Accept(each);
  std::erase_if(running_, [](const BatchText* text) { return text->ended; });
  for (BatchText* const text : running_) PublishPages(*model_, text);
  return {};
}

/// Decides how many tokens of each text the next pass feeds, takes their pages, and starts texts
/// while there is room.
Status ContinuousBatch::Plan() {
  Budget budget = BudgetOfPass();
  MARLIN_RETURN_IF_ERROR(PlanRunning(&budget));
  StartWaiting(&budget);
  if (interactive_) SpendRest(&budget);
  return AddDrafts(*model_, slots_, running_, budget.room, &costs_);
}

ContinuousBatch::Budget ContinuousBatch::BudgetOfPass() const {
  const bool bounded =
      !interactive_ || std::any_of(running_.begin(), running_.end(),
                                   [](const BatchText* text) { return text->left() == 1; });
  return {bounded ? prefill_tokens_ : pass_tokens_, pass_tokens_ - std::ssize(running_)};
}

/// Each prompt takes at most half of what those before it left, so that a short one need not wait
/// for all passes of a long one. SpendRest gives them what nobody took.
void ContinuousBatch::Choose(BatchText& text, const Budget& budget) const {
  const int64_t share = interactive_ ? budget.prefill - budget.prefill / 2 : budget.prefill;
  text.drafts.clear();
  const int64_t most =
      text.left() == 1 ? text.ready() : std::min({text.ready(), share, 1 + budget.room});
  text.piece = PieceToState(*model_, text, most);
}

Status ContinuousBatch::PlanRunning(Budget* budget) {
  for (size_t i = 0; i < running_.size();) {
    BatchText& text = *running_[i];
    if (text.left() > 1) MARLIN_RETURN_IF_ERROR(Adopt(text));
    Choose(text, *budget);
    const Status reserved = Reserve(text, running_);
    if (reserved.code() == Code::kOutOfMemory) {
      MARLIN_RETURN_IF_ERROR(PutBackNewest(reserved));
      ++budget->room;
      continue;
    }
    MARLIN_RETURN_IF_ERROR(reserved);
    budget->Take(text);
    ++i;
  }
  return {};
}

void ContinuousBatch::StartWaiting(Budget* budget) {
  while (!waiting_.empty() && (!full_ || running_.empty()) && budget->room > 0 &&
         budget->prefill > 0 && std::ssize(running_) < slots_.count()) {
    BatchText& text = *waiting_.front();
    if (!Start(text)) continue;
    --budget->room;
    Choose(text, *budget);
    const Status reserved = Reserve(text, running_);
    if (!reserved.ok()) {
      ++budget->room;
      if (reserved.code() == Code::kOutOfMemory && !running_.empty()) {
        text.sequence.reset();
        full_ = true;
        return;
      }
      waiting_.pop_front();
      End(text, StopReason::kCallback, reserved);
      continue;
    }
    budget->Take(text);
    text.alone = running_.empty();
    for (BatchText* const other : running_) other->alone = false;
    waiting_.pop_front();
    running_.push_back(&text);
  }
}

/// Gives the rest of a pass to the prompts that may use it, the first one first.
void ContinuousBatch::SpendRest(Budget* budget) {
  for (BatchText* const text : running_) {
    const int64_t before = text->piece;
    const int64_t more = std::min({text->ready() - before, budget->prefill, budget->room});
    if (more <= 0) continue;
    text->piece = PieceToState(*model_, *text, before + more);
    if (!Reserve(*text, running_).ok()) {
      text->piece = before;
      return;
    }
    budget->prefill -= text->piece - before;
    budget->room -= text->piece - before;
  }
}

/// Returns false after the text has ended with an error.
bool ContinuousBatch::Start(BatchText& text) {
  Result<Sequence> sequence = text.given == nullptr ? model_->NewSequence({.truncatable = false})
                                                    : Result<Sequence>(std::move(*text.given));
  Status status = sequence.status();
  if (status.ok()) {
    text.sequence.emplace(*std::move(sequence));
    text.tokens.assign(text.prompt.begin(), text.prompt.end());
    text.tokens.insert(text.tokens.end(), text.generated.token_ids.begin(),
                       text.generated.token_ids.end());
    if (text.drafter != nullptr) status = text.drafter->Restart(text.sequence->length());
    if (status.ok()) status = Adopt(text);
  }
  if (!status.ok()) {
    waiting_.pop_front();
    End(text, StopReason::kCallback, status);
    return false;
  }
  if (text.reports_prompt()) text.of_prompt.clear();
  if (!text.start) text.start = Clock::now();
  return true;
}

/// Frees the pages of the text that started last, which starts again when another has ended. If
/// that text was alone all the time, it ends with `cause`.
Status ContinuousBatch::PutBackNewest(const Status& cause) {
  BatchText& text = *running_.back();
  if (text.alone) {
    running_.pop_back();
    End(text, StopReason::kCallback, cause);
    return {};
  }
  MARLIN_RETURN_IF_ERROR(slots_.LeaveWithState(text));
  text.sequence.reset();
  running_.pop_back();
  waiting_.push_front(&text);
  full_ = true;
  text.put_back = true;
  ++counts_.put_back;
  return {};
}

/// Adds the tokens sampled for a text.
void ContinuousBatch::Accept(const SampledText& sampled) {
  BatchText& text = *sampled.text;
  if (!text.drafts.empty()) {
    const int64_t accepted = std::max<int64_t>(std::ssize(sampled.tokens) - 1, 0);
    text.control->Learn(std::ssize(text.drafts), accepted);
    text.generated.drafts = text.control->counts();
    counts_.drafts += std::ssize(text.drafts);
    counts_.accepted += accepted;
  }
  for (size_t i = 0; i < sampled.tokens.size(); ++i) {
    const TokenLogprobs* const logprobs = sampled.logprobs.empty() ? nullptr : &sampled.logprobs[i];
    if (!AcceptToken(text, sampled.tokens[i], logprobs)) return;
  }
  if (!sampled.error.ok()) End(text, StopReason::kCallback, sampled.error);
}

/// Returns whether the text goes on.
bool ContinuousBatch::AcceptToken(BatchText& text, int32_t token, const TokenLogprobs* logprobs) {
  Generated& generated = text.generated;
  const double seconds = std::chrono::duration<double>(Clock::now() - *text.start).count();
  if (generated.prefill_seconds == 0) generated.prefill_seconds = seconds;
  text.allowed.clear();
  const auto end = [&](StopReason reason) {
    End(text, reason);
    return false;
  };
  if (text.options->max_tokens == 0) return end(StopReason::kMaxTokens);
  if (Stops(text, token)) return end(StopReason::kStopToken);
  generated.token_ids.push_back(token);
  text.tokens.push_back(token);
  generated.decode_seconds = seconds - generated.prefill_seconds;
  if (!observer_->Sampled(text, token, logprobs)) return end(StopReason::kCallback);
  if (std::ssize(generated.token_ids) == text.options->max_tokens) {
    return end(StopReason::kMaxTokens);
  }
  // The last token that was sampled is not fed yet.
  if (std::ssize(text.tokens) > model_->info().max_positions) {
    return end(StopReason::kContextFull);
  }
  return true;
}

void ContinuousBatch::Cancel(BatchText& text) {
  std::erase(waiting_, &text);
  std::erase(running_, &text);
  End(text, StopReason::kCallback);
}

void ContinuousBatch::EndRunning(const Status& error) {
  for (BatchText* const text : std::exchange(running_, {})) {
    End(*text, StopReason::kCallback, error);
  }
}

void ContinuousBatch::EndAll(const Status& error) {
  EndRunning(error);
  for (BatchText* const text : std::exchange(waiting_, {})) {
    End(*text, StopReason::kCallback, error);
  }
}

void ContinuousBatch::End(BatchText& text, StopReason reason, const Status& error) {
  text.generated.stop_reason = reason;
  text.error = error;
  text.ended = true;
  slots_.Leave(text);
  if (error.ok() && text.sequence) PublishPages(*model_, &text);
  if (text.given != nullptr && text.sequence) {
    CacheOf(text).Release(text.sequence->length());
    *text.given = *std::move(text.sequence);
  }
  text.sequence.reset();
  full_ = false;
  observer_->Ended(text);
}

}  // namespace marlin
