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
  Status status;
  for (int64_t made = 1;;) {
    // The texts that want more are the first ones.
    const auto end =
        std::ranges::find_if(texts_, [&](const Text& text) { return text.most <= made; });
    if (end == texts_.begin()) return status;
    const int64_t next = std::prev(end)->most;
    const auto goes_on = [&](const Text& text) { return std::ssize(text.request->guess) == made; };
    for (auto first = std::find_if(texts_.begin(), end, goes_on); first != end;) {
      const auto last = std::find_if_not(first, end, goes_on);
      const Status decoded = Decode(static_cast<size_t>(first - texts_.begin()),
                                    static_cast<size_t>(last - first), next - made);
      if (status.ok()) status = decoded;
      if (!decoded.ok() && decoded.code() != Code::kNonFiniteInput) return status;
      first = std::find_if(last, end, goes_on);
    }
    made = next;
  }
}

Status GuessCalls::Decode(size_t first, size_t count, int64_t steps) {
  const auto texts = std::span(texts_).subspan(first, count);
  std::vector<DecodeInput> inputs;
  for (Text& text : texts) {
    const auto hidden = std::span(text.hidden).last(static_cast<size_t>(hidden_size_));
    inputs.push_back({text.input.sequence, text.request->guess.back(), hidden, hidden});
  }
  std::vector<int32_t> sampled(count * static_cast<size_t>(steps));
  std::vector<int64_t> counts(count);
  const int64_t bytes = states_.dim(1);
  const MutableTensorView states(states_.As<uint8_t>() + static_cast<int64_t>(first) * bytes,
                                 DType::kU8, {static_cast<int64_t>(count), bytes});
  Status status = draft_.Decode(inputs, states, {.steps = steps}, sampled, counts);
  for (size_t i = 0; i < count; ++i) {
    const auto tokens = sampled.begin() + static_cast<int64_t>(i) * steps;
    std::vector<int32_t>& guess = texts[i].request->guess;
    guess.insert(guess.end(), tokens, tokens + counts[i]);
  }
  return status;
}

}  // namespace marlin
