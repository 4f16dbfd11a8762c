#include "marlin/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <new>

#include "base/macros.h"
#include "model/model_impl.h"
#include "ops/sampling.h"

namespace marlin {
namespace {

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Status CheckOptions(const Model& model, std::span<const int32_t> prompt,
                    const GenerateOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckModel("model", model));
  MARLIN_RETURN_IF_ERROR(CheckSampling(options.sampling));
  if (options.max_tokens < 0) {
    return Status(Code::kInvalidArgument,
                  fmt::format("max_tokens: expected 0 or more, got {}", options.max_tokens));
  }
  if (prompt.empty()) return Status(Code::kInvalidArgument, "prompt: no tokens");
  const auto length = static_cast<int64_t>(prompt.size());
  if (length > model.info().max_positions) {
    return Status(Code::kInvalidArgument,
                  fmt::format("prompt: {} tokens do not fit in a context of {}", length,
                              model.info().max_positions));
  }
  for (size_t i = 0; i < prompt.size(); ++i) {
    if (prompt[i] < 0 || prompt[i] >= model.info().vocab_size) {
      return Status(Code::kInvalidArgument, fmt::format("prompt: token {} is {}, expected 0..{}", i,
                                                        prompt[i], model.info().vocab_size - 1));
    }
  }
  return {};
}

/// The sampler state of one sequence, in device memory.
Result<DeviceBuffer> MakeSampler(const Model& model, std::span<const int32_t> prompt,
                                 const SamplingOptions& options) {
  const int64_t vocab = model.info().vocab_size;
  const auto prompt_bytes = static_cast<int64_t>(prompt.size_bytes());
  MARLIN_ASSIGN_OR_RETURN(const int64_t bytes, SamplerStateBytes(model.device(), vocab));
  MARLIN_ASSIGN_OR_RETURN(DeviceBuffer state, DeviceBuffer::Allocate(model.device(), bytes));
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer tokens,
                          DeviceBuffer::Allocate(model.device(), prompt_bytes));
  MARLIN_RETURN_IF_ERROR(tokens.CopyFrom(prompt.data(), prompt_bytes));
  const TensorView view(tokens.data(), DType::kI32, {static_cast<int64_t>(prompt.size())});
  MARLIN_RETURN_IF_ERROR(
      ResetSampler(model.device(), options, vocab, view, {state.data(), DType::kU8, {bytes}}));
  return state;
}

Result<Generated> Continue(const Model& model, std::span<const int32_t> prompt,
                           const GenerateOptions& options, const TokenCallback& callback) {
  MARLIN_RETURN_IF_ERROR(CheckOptions(model, prompt, options));
  const std::vector<int32_t>& stops =
      options.stop_token_ids.empty() ? model.info().eos_token_ids : options.stop_token_ids;
  const auto stopped = [&](int32_t token) {
    return !options.ignore_eos && std::find(stops.begin(), stops.end(), token) != stops.end();
  };
  Generated generated;
  if (options.max_tokens == 0) return generated;
  MARLIN_ASSIGN_OR_RETURN(Sequence sequence, model.NewSequence({.truncatable = false}));
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer sampler, MakeSampler(model, prompt, options.sampling));
  const MutableTensorView states(sampler.data(), DType::kU8, {1, sampler.bytes()});
  std::span<const int32_t> next = prompt;
  int32_t token = 0;
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    const SequenceInput input{&sequence, next, false};
    MARLIN_RETURN_IF_ERROR(model.ForwardAndSample({&input, 1}, states, {&token, 1}));
    // Up to the last counted token: the step that samples a stop token is not part of the rate.
    const double seconds = SecondsSince(start);
    if (sequence.length() == static_cast<int64_t>(prompt.size())) {
      generated.prefill_seconds = seconds;
    }
    if (stopped(token)) {
      generated.stop_reason = StopReason::kStopToken;
      break;
    }
    generated.token_ids.push_back(token);
    generated.decode_seconds = seconds - generated.prefill_seconds;
    if (callback && !callback(token)) {
      generated.stop_reason = StopReason::kCallback;
      break;
    }
    if (static_cast<int64_t>(generated.token_ids.size()) == options.max_tokens) break;
    if (sequence.length() == model.info().max_positions) {
      generated.stop_reason = StopReason::kContextFull;
      break;
    }
    next = {&token, 1};
  }
  return generated;
}

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
    return Continue(model, prompt, options, callback);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "generate: cannot allocate");
  }
}

}  // namespace marlin
