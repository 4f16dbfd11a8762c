#include "engine/speculation/layer_drafts.h"

#include <algorithm>
#include <utility>

#include "base/macros.h"

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

Status LayerDrafts::Feed(std::span<const int32_t> tokens, const MutableTensorView* sampler,
                         int32_t* guess, std::vector<float>* hidden) {
  const int64_t rows = kept_rows();
  // Earlier guesses are forgotten.
  MARLIN_RETURN_IF_ERROR(sequence_->Truncate(seen_ - first_));
  if (rows == 0) return {};
  std::vector<float> out(kept_.size());
  SequenceInput input{&*sequence_,
                      tokens.subspan(static_cast<size_t>(seen_) + 1, static_cast<size_t>(rows))};
  input.hidden = kept_;
  input.hidden_out = out;
  if (sampler != nullptr) {
    MARLIN_RETURN_IF_ERROR(draft_.ForwardAndSample({&input, 1}, *sampler, {guess, 1}));
  } else {
    input.feed_only = true;
    const Shape nothing{0, draft_.info().vocab_size};
    MARLIN_RETURN_IF_ERROR(draft_.Forward({&input, 1}, {nullptr, DType::kF32, nothing}));
  }
  hidden->assign(out.end() - width_, out.end());
  seen_ += rows;
  kept_.clear();
  return {};
}

Status LayerDrafts::Follow(std::span<const int32_t> tokens, int64_t /*fed*/) {
  if (kept_rows() < kLeastFollowed) return {};
  std::vector<float> hidden;
  return Feed(tokens, nullptr, nullptr, &hidden);
}

Result<std::vector<int32_t>> LayerDrafts::Guess(std::span<const int32_t> tokens, int64_t most,
                                                std::span<const uint8_t> sampler) {
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView state, samplers_->Begin(sampler));
  std::vector<float> hidden;
  std::vector<int32_t> guess(1);
  MARLIN_RETURN_IF_ERROR(Feed(tokens, &state, guess.data(), &hidden));
  // The layer was fed already, and what it said then is gone.
  if (hidden.empty()) return std::vector<int32_t>();
  std::vector<float> next(hidden.size());
  const int64_t room = draft_.info().max_positions - sequence_->length();
  most = std::min(most, room + 1);
  while (std::ssize(guess) < most) {
    SequenceInput input{&*sequence_, {&guess.back(), 1}};
    input.hidden = hidden;
    input.hidden_out = next;
    int32_t token = 0;
    MARLIN_RETURN_IF_ERROR(draft_.ForwardAndSample({&input, 1}, state, {&token, 1}));
    guess.push_back(token);
    hidden.swap(next);
  }
  return guess;
}

}  // namespace marlin
