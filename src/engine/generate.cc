#include "marlin/generate.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <new>
#include <utility>

#include "base/macros.h"
#include "base/seconds_since.h"
#include "engine/batch/drafted_generation.h"
#include "engine/batch/sampler_slots.h"
#include "engine/decode_call.h"
#include "engine/generation_checks.h"
#include "engine/model_impl.h"
#include "plan/step/sample_marks.h"

namespace marlin {
namespace {

/// The steps of the next pass after `count` tokens. Where a stop token may end the text within a
/// pass, passes grow with the text, so that at most a sixteenth of its steps follow its end.
int64_t StepsAfter(int64_t count, bool may_stop) {
  if (!may_stop) return kMostDecodeSteps;
  const auto sixteenth =
      static_cast<uint64_t>(std::clamp<int64_t>(count / 16, 1, kMostDecodeSteps));
  return static_cast<int64_t>(std::bit_floor(sixteenth));
}

/// One text.
class Generation {
 public:
  Generation(const Model& model, const GenerateOptions& options, const TokenCallback& callback)
      : model_(model), options_(options), callback_(callback), stops_(StopTokens(model, options)) {}

  Result<Generated> Run(std::span<const int32_t> prompt) {
    if (options_.max_tokens == 0) return generated_;
    MARLIN_ASSIGN_OR_RETURN(Sequence sequence, model_.NewSequence({.truncatable = false}));
    return Run(sequence, prompt);
  }

  /// Precondition: the sequence has less than the prompt.
  Result<Generated> Run(Sequence& sequence, std::span<const int32_t> prompt) {
    if (options_.max_tokens == 0) return generated_;
    MARLIN_ASSIGN_OR_RETURN(SamplerSlots sampler,
                            SamplerSlots::Make(model_.device(), model_.info().vocab_size, 1));
    const SamplerSlots::Reset reset{0, &options_.sampling, prompt};
    MARLIN_RETURN_IF_ERROR(sampler.ResetAll({&reset, 1}));
    const MutableTensorView states = sampler.First(1);
    const auto fed = static_cast<size_t>(sequence.length());
    const SequenceInput input{&sequence, prompt.subspan(fed), false};
    DecodeInput next{&sequence, 0};
    const auto start = std::chrono::steady_clock::now();
    MARLIN_RETURN_IF_ERROR(model_.ForwardAndSample({&input, 1}, states, {&next.token, 1}));
    generated_.prefill_seconds = SecondsSince(start);
    bool goes_on = Take(next.token);
    while (goes_on) {
      if (sequence.length() == model_.info().max_positions) {
        generated_.stop_reason = StopReason::kContextFull;
        break;
      }
      MARLIN_ASSIGN_OR_RETURN(goes_on, RunPass(&next, states));
    }
    return std::move(generated_);
  }

 private:
  int64_t count() const { return static_cast<int64_t>(generated_.token_ids.size()); }

  /// Decodes some tokens, and returns whether the text goes on.
  Result<bool> RunPass(DecodeInput* next, const MutableTensorView& states) {
    const int64_t steps =
        std::min(StepsAfter(count(), !stops_.empty()), options_.max_tokens - count());
    std::array<int32_t, kMostDecodeSteps> tokens = {};
    int64_t sampled = 0;
    int64_t steps_run = 0;
    const DecodeCall call{{next, 1},
                          states,
                          {steps, stops_},
                          std::span(tokens).first(static_cast<size_t>(steps)),
                          {&sampled, 1}};
    const auto start = std::chrono::steady_clock::now();
    MARLIN_RETURN_IF_ERROR(RunDecode(Internals::Impl(model_), call, &steps_run));
    MARLIN_RETURN_IF_ERROR(FirstSampleError(tokens, 1));
    const double seconds = SecondsSince(start);
    const int64_t before = count();
    bool goes_on = true;
    for (size_t i = 0; goes_on && i < static_cast<size_t>(sampled); ++i) goes_on = Take(tokens[i]);
    // The steps that sampled nothing of the text are not part of its rate, neither their tokens nor
    // their time.
    generated_.decode_seconds +=
        seconds * static_cast<double>(count() - before) / static_cast<double>(steps_run);
    next->token = tokens[static_cast<size_t>(sampled) - 1];
    return goes_on;
  }

  /// Adds a token to the text, and returns whether the text goes on.
  bool Take(int32_t token) {
    if (std::find(stops_.begin(), stops_.end(), token) != stops_.end()) {
      generated_.stop_reason = StopReason::kStopToken;
      return false;
    }
    generated_.token_ids.push_back(token);
    if (callback_ && !callback_(token)) {
      generated_.stop_reason = StopReason::kCallback;
      return false;
    }
    return count() < options_.max_tokens;
  }

  const Model& model_;
  const GenerateOptions& options_;
  const TokenCallback& callback_;
  std::span<const int32_t> stops_;
  Generated generated_;
};

Status CheckGeneration(const Model& model, std::span<const int32_t> prompt,
                       const GenerateOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckModel("model", model));
  MARLIN_RETURN_IF_ERROR(CheckGenerateOptions(model, options));
  return CheckPrompt("prompt", model, prompt);
}

Status OutOfMemory() { return Status(Code::kOutOfMemory, "generate: cannot allocate"); }

}  // namespace

std::string_view StopReasonName(StopReason reason) {
  switch (reason) {
    case StopReason::kMaxTokens:
      return "max_tokens";
    case StopReason::kStopToken:
      return "stop_token";
    case StopReason::kContextFull:
      return "context_full";
    case StopReason::kCallback:
      return "stopped";
  }
  return "unknown";
}

Result<Generated> Generate(const Model& model, std::span<const int32_t> prompt,
                           const GenerateOptions& options, const TokenCallback& callback) {
  try {
    MARLIN_RETURN_IF_ERROR(CheckGeneration(model, prompt, options));
    if (options.speculation.tokens > 0) {
      return GenerateDrafted(model, nullptr, prompt, options, callback);
    }
    return Generation(model, options, callback).Run(prompt);
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

Result<Generated> Generate(const Model& model, Sequence* sequence, std::span<const int32_t> prompt,
                           const GenerateOptions& options, const TokenCallback& callback) {
  try {
    if (sequence == nullptr) {
      return Status(Code::kInvalidArgument, "sequence: expected one, got null");
    }
    MARLIN_RETURN_IF_ERROR(CheckGeneration(model, prompt, options));
    if (sequence->length() >= std::ssize(prompt)) {
      return Status(Code::kInvalidArgument,
                    fmt::format("sequence: expected less than the {} tokens of the prompt, got {}",
                                prompt.size(), sequence->length()));
    }
    if (options.speculation.tokens > 0) {
      return GenerateDrafted(model, sequence, prompt, options, callback);
    }
    return Generation(model, options, callback).Run(*sequence, prompt);
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

}  // namespace marlin
