#include "engine/speculation/guess_calls.h"

#include <algorithm>
#include <functional>

#include "base/macros.h"

namespace marlin {

void GuessCalls::Add(GuessRequest* request, const SequenceInput& input) {
  // The last guess is not fed.
  const int64_t fed = input.sequence->length() + std::ssize(input.tokens);
  const int64_t room = draft_.info().max_positions - fed + 1;
  texts_.push_back({request, input, std::min(request->most, room), {}});
}

Status GuessCalls::SampleFirst() {
  if (texts_.empty()) return {};
  std::ranges::stable_sort(texts_, std::greater(), &Text::most);
  std::vector<std::span<const uint8_t>> samplers;
  for (const Text& text : texts_) samplers.push_back(text.request->sampler);
  MARLIN_ASSIGN_OR_RETURN(states_, samplers_.Begin(samplers));
  texts_.resize(static_cast<size_t>(states_.dim(0)));
  std::vector<SequenceInput> inputs;
  std::vector<int64_t> lengths;
  for (Text& text : texts_) {
    text.hidden.resize(text.input.tokens.size() * static_cast<size_t>(hidden_size_));
    text.input.hidden_out = text.hidden;
    inputs.push_back(text.input);
    lengths.push_back(text.input.sequence->length());
  }
  std::vector<int32_t> sampled(texts_.size());
  Status status = draft_.ForwardAndSample(inputs, states_, sampled);
  for (size_t i = 0; i < texts_.size(); ++i) {
    // A call that fails in a later pass has sampled tokens in earlier ones.
    if (inputs[i].sequence->length() == lengths[i]) continue;
    texts_[i].request->guess.push_back(sampled[i]);
  }
  return status;
}

Status GuessCalls::DecodeOthers() {
  // Texts with one guess are last.
  const auto one = std::ranges::find_if(texts_, [](const Text& text) { return text.most <= 1; });
  const auto count = static_cast<size_t>(one - texts_.begin());
  if (count == 0) return {};
  const int64_t steps = texts_.front().most - 1;
  std::vector<DecodeInput> inputs;
  for (const Text& text : std::span(texts_).first(count)) {
    const auto last_hidden = std::span(text.hidden).last(static_cast<size_t>(hidden_size_));
    inputs.push_back({text.input.sequence, text.request->guess.front(), last_hidden});
  }
  std::vector<int32_t> sampled(count * static_cast<size_t>(steps));
  std::vector<int64_t> counts(count);
  const MutableTensorView states(states_.data(), states_.dtype(),
                                 {static_cast<int64_t>(count), states_.dim(1)});
  Status status = draft_.Decode(inputs, states, {.steps = steps}, sampled, counts);
  for (size_t i = 0; i < count; ++i) {
    const auto first = sampled.begin() + static_cast<int64_t>(i) * steps;
    std::vector<int32_t>& guess = texts_[i].request->guess;
    guess.insert(guess.end(), first, first + counts[i]);
  }
  return status;
}

}  // namespace marlin
