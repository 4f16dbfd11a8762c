#include "engine/batch/layer_drafts.h"

#include <algorithm>
#include <utility>

#include "base/macros.h"

namespace marlin {

LayerDrafts::LayerDrafts(Model draft, int64_t most)
    : draft_(std::move(draft)), most_(most), width_(draft_.info().hidden_size) {}

Status LayerDrafts::Restart() {
  MARLIN_ASSIGN_OR_RETURN(Sequence sequence, draft_.NewSequence());
  sequence_.emplace(std::move(sequence));
  seen_ = 0;
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

Status LayerDrafts::Feed(std::span<const int32_t> tokens, std::span<float> logits,
                         std::vector<float>* hidden) {
  const int64_t rows = std::ssize(kept_) / width_;
  // Earlier guesses are forgotten.
  MARLIN_RETURN_IF_ERROR(sequence_->Truncate(seen_));
  if (rows == 0) return {};
  std::vector<float> out(kept_.size());
  SequenceInput input{&*sequence_,
                      tokens.subspan(static_cast<size_t>(seen_) + 1, static_cast<size_t>(rows))};
  input.feed_only = logits.empty();
  input.hidden = kept_;
  input.hidden_out = out;
  const Shape shape{input.feed_only ? 0 : 1, draft_.info().vocab_size};
  MARLIN_RETURN_IF_ERROR(draft_.Forward({&input, 1}, {logits.data(), DType::kF32, shape}));
  hidden->assign(out.end() - width_, out.end());
  seen_ += rows;
  kept_.clear();
  return {};
}

Status LayerDrafts::Follow(std::span<const int32_t> tokens) {
  std::vector<float> hidden;
  return Feed(tokens, {}, &hidden);
}

Result<std::vector<int32_t>> LayerDrafts::Guess(std::span<const int32_t> tokens, int64_t room) {
  const int64_t vocab = draft_.info().vocab_size;
  std::vector<float> hidden;
  std::vector<float> logits(static_cast<size_t>(vocab));
  std::vector<int32_t> guess;
  MARLIN_RETURN_IF_ERROR(Feed(tokens, logits, &hidden));
  // The layer was fed already, and the logits of then are gone.
  if (hidden.empty()) return guess;
  std::vector<float> next(hidden.size());
  const int64_t most = std::min(most_, room);
  while (true) {
    const auto likely = std::max_element(logits.begin(), logits.end());
    guess.push_back(static_cast<int32_t>(likely - logits.begin()));
    if (std::ssize(guess) >= most) return guess;
    SequenceInput input{&*sequence_, {&guess.back(), 1}};
    input.hidden = hidden;
    input.hidden_out = next;
    MARLIN_RETURN_IF_ERROR(draft_.Forward({&input, 1}, {logits.data(), DType::kF32, {1, vocab}}));
    hidden.swap(next);
  }
}

}  // namespace marlin
