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

size_t GuessCalls::CountBeyond(int64_t guesses) const {
  const auto end =
      std::ranges::find_if(texts_, [&](const Text& text) { return text.most <= guesses; });
  return static_cast<size_t>(end - texts_.begin());
}

MutableTensorView GuessCalls::States(size_t count) const {
  return {states_.data(), states_.dtype(), {static_cast<int64_t>(count), states_.dim(1)}};
}

Status GuessCalls::SampleFirst() {
  if (texts_.empty()) return {};
  std::ranges::stable_sort(texts_, std::greater(), &Text::most);
  std::vector<std::span<const uint8_t>> samplers;
  for (const Text& text : texts_) samplers.push_back(text.request->sampler);
  MARLIN_ASSIGN_OR_RETURN(states_, samplers_.Begin(samplers));
  texts_.resize(static_cast<size_t>(states_.dim(0)));
  return Sample(texts_.size());
}

Status GuessCalls::Sample(size_t count) {
  std::vector<std::vector<float>> hidden(count);
  std::vector<SequenceInput> inputs;
  for (size_t i = 0; i < count; ++i) {
    SequenceInput input = texts_[i].input;
    hidden[i].resize(input.tokens.size() * static_cast<size_t>(hidden_size_));
    input.hidden_out = hidden[i];
    inputs.push_back(input);
  }
  std::vector<int64_t> lengths;
  lengths.reserve(count);
  for (const SequenceInput& input : inputs) lengths.push_back(input.sequence->length());
  std::vector<int32_t> sampled(count);
  Status status = draft_.ForwardAndSample(inputs, States(count), sampled);
  for (size_t i = 0; i < count; ++i) {
    // A call that fails in a later pass has sampled tokens in earlier ones.
    if (inputs[i].sequence->length() == lengths[i]) continue;
    Text& text = texts_[i];
    text.request->guess.push_back(sampled[i]);
    text.hidden.assign(hidden[i].end() - hidden_size_, hidden[i].end());
  }
  return status;
}

Status GuessCalls::SampleOthers() {
  for (int64_t guesses = 1;; ++guesses) {
    const size_t count = CountBeyond(guesses);
    if (count == 0) return {};
    for (Text& text : std::span(texts_).first(count)) {
      text.input.tokens = {&text.request->guess.back(), 1};
      text.input.hidden = text.hidden;
    }
    MARLIN_RETURN_IF_ERROR(Sample(count));
  }
}

Status GuessCalls::DecodeOthers() {
  const size_t count = CountBeyond(1);
  if (count == 0) return {};
  const int64_t steps = texts_.front().most - 1;
  std::vector<DecodeInput> inputs;
  for (const Text& text : std::span(texts_).first(count)) {
    inputs.push_back({text.input.sequence, text.request->guess.front()});
  }
  std::vector<int32_t> sampled(count * static_cast<size_t>(steps));
  std::vector<int64_t> counts(count);
  Status status = draft_.Decode(inputs, States(count), {.steps = steps}, sampled, counts);
  for (size_t i = 0; i < count; ++i) {
    const auto first = sampled.begin() + static_cast<int64_t>(i) * steps;
    std::vector<int32_t>& guess = texts_[i].request->guess;
    guess.insert(guess.end(), first, first + counts[i]);
  }
  return status;
}

}  // namespace marlin
