#include "engine/batch/scheduler_checks.h"

#include <fmt/core.h>

#include <algorithm>
#include <string_view>

#include "base/checked.h"
#include "base/macros.h"
#include "engine/generation_checks.h"
#include "engine/speculation/speculation.h"
#include "marlin/sampling.h"

namespace marlin {
namespace {

Status CheckNotNegative(std::string_view name, int64_t value) {
  if (value >= 0) return {};
  return Status(Code::kInvalidArgument, fmt::format("{}: expected 0 or more, got {}", name, value));
}

}  // namespace

Status CheckSchedulerOptions(const Model& model, const SchedulerOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckNotNegative("max_running", options.max_running));
  MARLIN_RETURN_IF_ERROR(CheckNotNegative("max_waiting", options.max_waiting));
  MARLIN_RETURN_IF_ERROR(CheckNotNegative("prefill_tokens", options.prefill_tokens));
  return CheckSpeculation(model, options.speculation);
}

Status CheckRequest(const Model& model, const Request& request) {
  MARLIN_RETURN_IF_ERROR(CheckGenerateOptions(model, request.options));
  if (request.options.speculation.tokens > 0) {
    return Status(Code::kInvalidArgument,
                  "speculation: expected in SchedulerOptions, got it of a request");
  }
  MARLIN_RETURN_IF_ERROR(CheckPrompt("prompt", model, request.prompt));
  const int64_t most = std::min(kMostLikelyTokens, model.info().vocab_size);
  if (request.logprobs >= -1 && request.logprobs <= most) return {};
  return Status(Code::kInvalidArgument,
                fmt::format("logprobs: expected -1..{}, got {}", most, request.logprobs));
}

Status CheckAllowed(const Model& model, std::span<const uint32_t> allowed) {
  const int64_t vocab = model.info().vocab_size;
  const int64_t words = CeilDivide(vocab, int64_t{32});
  if (std::ssize(allowed) != words) {
    return Status(Code::kInvalidArgument,
                  fmt::format("allowed: expected {} words for {} tokens, got {}", words, vocab,
                              allowed.size()));
  }
  for (int64_t word = 0; word < words; ++word) {
    const int64_t tokens = std::min<int64_t>(vocab - 32 * word, 32);
    const uint32_t real = tokens == 32 ? ~0U : (1U << static_cast<uint32_t>(tokens)) - 1;
    if ((allowed[static_cast<size_t>(word)] & real) != 0) return {};
  }
  return Status(Code::kInvalidArgument, "allowed: expected a token, got none");
}

}  // namespace marlin
