#include "engine/batch/batch_pass.h"

#include <algorithm>
#include <deque>
#include <new>

#include "base/internals.h"
#include "base/macros.h"
#include "base/seconds_since.h"
#include "engine/batch/batch_states.h"
#include "engine/decode_call.h"
#include "engine/forward_call.h"
#include "engine/model_impl.h"
#include "ops/device/device.h"
#include "plan/step/sample_marks.h"

namespace marlin {
namespace {

/// Memory of the host may run out like memory of the device.
template <typename Call>
Status WithMemory(const Call& call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "forward: cannot allocate");
  }
}

/// Where the device takes one step after another, a text that ends within several would waste the
/// others. No text goes beyond a length at which it publishes states.
int64_t StepsOfDecode(const Model& model, const BatchSlots& slots) {
  if (!Internals::Impl(model.device()).backend().records()) return 1;
  int64_t wanted = 1;
  int64_t most = kMostDecodeSteps;
  for (const BatchText* const text : slots.texts()) {
    wanted = std::max(wanted, text->options->max_tokens - std::ssize(text->generated.token_ids));
    most = PieceToState(model, *text, most);
  }
  return std::min(most, wanted);
}

/// One call that feeds texts and samples some of them.
class FeedCall {
 public:
  FeedCall(const Model::Impl& model, const BatchSlots& slots) : model_(model), slots_(slots) {}

  /// Precondition: texts that are sampled are added before the others.
  void Add(BatchText& text) {
    const bool samples = text.samples();
    SequenceInput input{.sequence = &*text.sequence,
                        .tokens = text.next(),
                        .all_logits = text.reports_prompt(),
                        .feed_only = !samples};
    if (input.all_logits && !samples) {
      input.next_token = text.tokens[static_cast<size_t>(text.sequence->length() + text.piece)];
    }
    if (samples) {
      state_rows_.push_back(static_cast<int32_t>(text.slot));
      allowed_.resize(allowed_.size() + 1 + text.drafts.size());
      allowed_[allowed_.size() - 1 - text.drafts.size()] = text.allowed;
      if (!text.drafts.empty()) AddDrafts(text, &input);
    }
    lengths_.push_back(text.sequence->length());
    if (text.reads_hidden()) input.hidden_out = text.drafter->Receive(std::ssize(input.tokens));
    has_masks_ |= samples && !text.allowed.empty();
    if (input.all_logits || text.logprobs >= 0) {
      likely_ = std::max({likely_, text.logprobs, int64_t{0}});
    }
    texts_.push_back(&text);
    inputs_.push_back(input);
  }

  Status Run() {
    int64_t rows = 0;
    for (const SequenceInput& input : inputs_) rows += WantedRows(input);
    tokens_.assign(allowed_.size(), 0);
    SampleExtras extras;
    if (has_masks_) extras.allowed = allowed_;
    if (likely_ >= 0) {
      of_tokens_.resize(static_cast<size_t>(rows));
      likely_tokens_.resize(static_cast<size_t>(rows * likely_));
      of_likely_.resize(likely_tokens_.size());
      extras.likely = likely_;
      extras.of_tokens = of_tokens_;
      extras.likely_tokens = likely_tokens_;
      extras.of_likely = of_likely_;
    }
    Wanted wanted;
    wanted.samplers = slots_.states();
    wanted.tokens = tokens_;
    // Every slot is sampled, in order, or those that are have their rows.
    const bool in_order = state_rows_.size() == slots_.texts().size() &&
                          std::is_sorted(state_rows_.begin(), state_rows_.end());
    if (!in_order) wanted.sampler_rows = state_rows_;
    if (has_masks_ || likely_ >= 0) wanted.extras = &extras;
    return RunForward(model_, inputs_, wanted);
  }

  void Take(std::vector<SampledText>* sampled) const {
    size_t row = 0;
    auto tokens = std::span(tokens_);
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const SequenceInput& input = inputs_[i];
      BatchText& text = *texts_[i];
      if (text.drafter != nullptr) text.drafter->Keep(text.sequence->length() - lengths_[i]);
      const auto rows = static_cast<size_t>(WantedRows(input));
      const auto count = static_cast<size_t>(SampledTokens(input));
      if (input.all_logits) TakePrompt(input, row, rows - count, &text);
      if (!input.feed_only) {
        sampled->push_back(TakeSampled(tokens.first(count), row + rows - count, &text));
        tokens = tokens.subspan(count);
      }
      row += rows;
    }
  }

 private:
  void AddDrafts(const BatchText& text, SequenceInput* input) {
    std::vector<int32_t>& fed = drafted_.emplace_back(input->tokens.begin(), input->tokens.end());
    fed.insert(fed.end(), text.drafts.begin(), text.drafts.end());
    input->tokens = fed;
    input->drafts = std::ssize(text.drafts);
  }

  /// The log-probabilities of the tokens that follow the first ones of an input.
  void TakePrompt(const SequenceInput& input, size_t row, size_t rows, BatchText* text) const {
    for (size_t i = 0; i < rows; ++i) {
      const bool last = i + 1 == input.tokens.size();
      const int32_t token = last ? input.next_token : input.tokens[i + 1];
      text->of_prompt.push_back(At(row + i, token, text->logprobs));
    }
  }

  SampledText TakeSampled(std::span<const int32_t> tokens, size_t row, BatchText* text) const {
    SampledText sampled{.text = text};
    const auto count = static_cast<size_t>(CountSampled(tokens));
    sampled.tokens.assign(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(count));
    if (count < tokens.size()) sampled.error = SampleError(tokens[count]);
    if (text->logprobs < 0) return sampled;
    for (size_t i = 0; i < count; ++i) {
      sampled.logprobs.push_back(At(row + i, tokens[i], text->logprobs));
    }
    return sampled;
  }

  TokenLogprobs At(size_t row, int32_t token, int64_t likely) const {
    TokenLogprobs logprobs;
    logprobs.token = {token, of_tokens_[row]};
    for (int64_t i = 0; i < likely; ++i) {
      const size_t at = row * static_cast<size_t>(likely_) + static_cast<size_t>(i);
      logprobs.top.push_back({likely_tokens_[at], of_likely_[at]});
    }
    return logprobs;
  }

  const Model::Impl& model_;
  const BatchSlots& slots_;
  std::vector<BatchText*> texts_;
  std::vector<SequenceInput> inputs_;
  std::vector<int64_t> lengths_;              ///< Tokens of the inputs' sequences before the call.
  std::deque<std::vector<int32_t>> drafted_;  ///< The tokens of inputs with drafts.
  std::vector<int32_t> state_rows_;
  std::vector<std::span<const uint32_t>> allowed_;  ///< One per token that may be sampled.
  bool has_masks_ = false;
  int64_t likely_ = -1;  ///< Most likely tokens of each row; -1: no log-probabilities.
  std::vector<int32_t> tokens_;
  std::vector<float> of_tokens_;
  std::vector<int32_t> likely_tokens_;
  std::vector<float> of_likely_;
};

/// Samples the next tokens of texts that all decode and have slots.
Status DecodeTexts(const Model& model, const BatchSlots& slots, std::vector<SampledText>* sampled) {
  const int64_t steps = StepsOfDecode(model, slots);
  std::vector<DecodeInput> inputs;
  std::vector<int32_t> stops;
  for (BatchText* const text : slots.texts()) {
    inputs.push_back({&*text->sequence, text->tokens.back()});
    stops.insert(stops.end(), text->stops.begin(), text->stops.end());
  }
  std::sort(stops.begin(), stops.end());
  stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
  std::vector<int32_t> tokens(inputs.size() * static_cast<size_t>(steps));
  std::vector<int64_t> counts(inputs.size());
  const DecodeCall call{inputs, slots.states(), {steps, stops}, tokens, counts};
  Status status = WithMemory([&] { return RunDecode(Internals::Impl(model), call); });
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto* const first = tokens.data() + i * static_cast<size_t>(steps);
    SampledText text{.text = slots.texts()[i]};
    text.tokens.assign(first, first + counts[i]);
    if (counts[i] < steps) text.error = SampleError(first[counts[i]]);
    sampled->push_back(std::move(text));
  }
  return status;
}

/// Feeds the pieces and drafts of the texts that have some, and samples each text that then has no
/// more.
Status FeedTexts(const Model& model, const BatchSlots& slots, std::span<BatchText* const> running,
                 std::vector<SampledText>* sampled) {
  FeedCall call(Internals::Impl(model), slots);
  std::vector<BatchText*> sampled_texts(slots.texts().begin(), slots.texts().end());
  std::erase_if(sampled_texts, [](const BatchText* text) { return text->piece == 0; });
  // Neighbors with as many guesses share the turns of recurrent operations.
  std::ranges::stable_sort(sampled_texts, {},
                           [](const BatchText* text) { return text->drafts.size(); });
  for (BatchText* const text : sampled_texts) call.Add(*text);
  for (BatchText* const text : running) {
    if (text->piece > 0 && text->slot < 0) call.Add(*text);
  }
  MARLIN_RETURN_IF_ERROR(WithMemory([&] { return call.Run(); }));
  call.Take(sampled);
  return {};
}

/// The rows of the next pass, if all texts that it feeds decode; otherwise 0.
int64_t RowsOfDecode(std::span<BatchText* const> running) {
  int64_t rows = 0;
  for (const BatchText* const text : running) {
    if (text->piece == 0) continue;
    if (text->left() > 1) return 0;
    rows += 1 + std::ssize(text->drafts);
  }
  return rows;
}

}  // namespace

Status RunTexts(const Model& model, const BatchSlots& slots, std::span<BatchText* const> running,
                DraftCosts* costs, std::vector<SampledText>* sampled) {
  const bool all_decode = std::all_of(running.begin(), running.end(), [](const BatchText* text) {
    return text->left() == 1 && !text->constrained && text->logprobs < 0 && text->drafts.empty() &&
           !text->reads_hidden();
  });
  const int64_t rows = RowsOfDecode(running);
  const auto start = std::chrono::steady_clock::now();
  MARLIN_RETURN_IF_ERROR(all_decode ? DecodeTexts(model, slots, sampled)
                                    : FeedTexts(model, slots, running, sampled));
  if (rows == 0) return {};
  size_t steps = 1;
  if (all_decode) {
    for (const SampledText& text : *sampled) steps = std::max(steps, text.tokens.size());
  }
  costs->AddPass(rows, SecondsSince(start) / static_cast<double>(steps));
  return {};
}

}  // namespace marlin
