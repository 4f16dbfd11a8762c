#include "engine/speculation/model_drafts.h"

#include <algorithm>
#include <utility>

#include "base/internals.h"
#include "base/macros.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
#include "engine/speculation/guess_calls.h"

namespace marlin {

ModelDrafts::ModelDrafts(Model draft, int64_t vocab, std::shared_ptr<DraftSamplers> samplers)
    : draft_(std::move(draft)), vocab_(vocab), samplers_(std::move(samplers)) {}

Status ModelDrafts::Restart(int64_t /*first*/) {
  MARLIN_ASSIGN_OR_RETURN(Sequence sequence, draft_.NewSequence());
  sequence_.emplace(std::move(sequence));
  fed_.clear();
  known_ = 0;
  return {};
}

Status ModelDrafts::GoBack(std::span<const int32_t> tokens) {
  const auto text = tokens.first(tokens.size() - 1);
  const auto differ = std::mismatch(fed_.begin(), fed_.end(), text.begin(), text.end());
  auto same = static_cast<size_t>(differ.first - fed_.begin());
  // A call that failed may have fed more than fed_ says.
  if (sequence_->length() == static_cast<int64_t>(same)) return {};
  // A text that is tried again ends before the states that are kept.
  if (Internals::Impl(draft_).pool->HasStates()) same = same < known_ ? 0 : known_;
  MARLIN_RETURN_IF_ERROR(sequence_->Truncate(static_cast<int64_t>(same)));
  fed_.resize(same);
  known_ = std::min(known_, same);
  return {};
}

void ModelDrafts::Know(std::span<const int32_t> tokens) {
  fed_.insert(fed_.end(), tokens.begin(), tokens.end());
  known_ = fed_.size();
  sequence_->state()->cache.KeepStates();
}

std::span<const int32_t> ModelDrafts::Unfed(std::span<const int32_t> tokens) const {
  const ModelInfo& info = draft_.info();
  const auto unfed = tokens.subspan(fed_.size());
  const bool fits = std::ssize(tokens) <= info.max_positions;
  const auto is_known = [&](int32_t token) { return token < info.vocab_size; };
  return fits && std::all_of(unfed.begin(), unfed.end(), is_known) ? unfed
                                                                   : std::span<const int32_t>();
}

Result<int64_t> ModelDrafts::Follow(std::span<const int32_t> tokens, int64_t fed) {
  if (fed - std::ssize(fed_) < kLeastFollowed) return 0;
  MARLIN_RETURN_IF_ERROR(GoBack(tokens));
  const auto unfed = Unfed(tokens.first(static_cast<size_t>(fed)));
  if (unfed.empty()) return 0;
  SequenceInput input{&*sequence_, unfed};
  input.feed_only = true;
  const Shape nothing{0, draft_.info().vocab_size};
  MARLIN_RETURN_IF_ERROR(draft_.Forward({&input, 1}, {nullptr, DType::kF32, nothing}));
  Know(unfed);
  return std::ssize(unfed);
}

Status ModelDrafts::GuessAll(std::span<GuessRequest> requests) {
  GuessCalls calls(draft_, samplers_.get(), 0);
  for (GuessRequest& request : requests) {
    auto& drafter = static_cast<ModelDrafts&>(*request.drafter);
    MARLIN_RETURN_IF_ERROR(drafter.GoBack(request.tokens));
    const auto unfed = drafter.Unfed(request.tokens);
    if (!unfed.empty()) calls.Add(&request, {&*drafter.sequence_, unfed});
  }
  Status first = calls.SampleFirst();
  for (const GuessRequest& request : requests) {
    auto& drafter = static_cast<ModelDrafts&>(*request.drafter);
    if (!request.guess.empty()) drafter.Know(drafter.Unfed(request.tokens));
  }
  Status others;
  if (first.ok() || first.code() == Code::kNonFiniteInput) others = calls.DecodeOthers();
  for (GuessRequest& request : requests) {
    static_cast<ModelDrafts&>(*request.drafter).TakeGuess(&request);
  }
  return first.ok() ? others : first;
}

void ModelDrafts::TakeGuess(GuessRequest* request) {
  std::vector<int32_t>& guess = request->guess;
  // The last guess was not fed.
  if (!guess.empty()) fed_.insert(fed_.end(), guess.begin(), guess.end() - 1);
  // The model may lack padding of the draft's vocabulary.
  const auto is_unknown = [&](int32_t token) { return token >= vocab_; };
  guess.erase(std::find_if(guess.begin(), guess.end(), is_unknown), guess.end());
}

}  // namespace marlin
