#include "engine/speculation/layer_drafts.h"

#include <algorithm>
#include <utility>

#include "base/macros.h"
#include "engine/speculation/guess_calls.h"

namespace marlin {

LayerDrafts::LayerDrafts(Model draft, std::shared_ptr<DraftSamplers> samplers)
    : draft_(std::move(draft)), samplers_(std::move(samplers)), width_(draft_.info().hidden_size) {}

Status LayerDrafts::Restart(int64_t first) {
  MARLIN_ASSIGN_OR_RETURN(Sequence sequence, draft_.NewSequence());
  sequence_.emplace(std::move(sequence));
  first_ = seen_ = first;
  kept_.clear();
  return {};
}

std::span<float> LayerDrafts::Receive(int64_t rows) {
  received_.resize(static_cast<size_t>(rows * width_));
  return received_;
}

void LayerDrafts::Keep(int64_t rows) {
  const auto count = static_cast<size_t>(rows * width_);
  kept_.insert(kept_.end(), received_.begin(),
               received_.begin() + static_cast<std::ptrdiff_t>(count));
}

Result<SequenceInput> LayerDrafts::Unseen(std::span<const int32_t> tokens) {
  MARLIN_RETURN_IF_ERROR(sequence_->Truncate(seen_ - first_));
  SequenceInput input{&*sequence_, tokens.subspan(static_cast<size_t>(seen_) + 1,
                                                  static_cast<size_t>(kept_rows()))};
  input.hidden = kept_;
  return input;
}

void LayerDrafts::See() {
  seen_ += kept_rows();
  kept_.clear();
}

Result<int64_t> LayerDrafts::Follow(std::span<const int32_t> tokens, int64_t /*fed*/) {
  const int64_t rows = kept_rows();
  if (rows < kLeastFollowed) return 0;
  MARLIN_ASSIGN_OR_RETURN(SequenceInput input, Unseen(tokens));
  input.feed_only = true;
  const Shape nothing{0, draft_.info().vocab_size};
  MARLIN_RETURN_IF_ERROR(draft_.Forward({&input, 1}, {nullptr, DType::kF32, nothing}));
  See();
  return rows;
}

Status LayerDrafts::GuessAll(std::span<GuessRequest> requests) {
  GuessCalls calls(draft_, samplers_.get(), width_);
  for (GuessRequest& request : requests) {
    auto& drafter = static_cast<LayerDrafts&>(*request.drafter);
    MARLIN_ASSIGN_OR_RETURN(const SequenceInput input, drafter.Unseen(request.tokens));
    // Without a row the layer was fed already, and what it said then is gone.
    if (!input.tokens.empty()) calls.Add(&request, input);
  }
  Status first = calls.SampleFirst();
  for (const GuessRequest& request : requests) {
    if (!request.guess.empty()) static_cast<LayerDrafts&>(*request.drafter).See();
  }
  if (!first.ok() && first.code() != Code::kNonFiniteInput) return first;
  Status others = calls.DecodeOthers();
  return first.ok() ? others : first;
}

}  // namespace marlin
