#include "engine/generation_checks.h"

#include <fmt/core.h>

#include "base/macros.h"
#include "engine/speculation/speculation.h"
#include "ops/decoder/sampling.h"

namespace marlin {

Status CheckGenerateOptions(const Model& model, const GenerateOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckSampling(options.sampling));
  MARLIN_RETURN_IF_ERROR(CheckSpeculation(model, options.speculation));
  if (options.max_tokens >= 0) return {};
  return Status(Code::kInvalidArgument,
                fmt::format("max_tokens: expected 0 or more, got {}", options.max_tokens));
}

Status CheckPrompt(std::string_view name, const Model& model, std::span<const int32_t> prompt) {
  const auto invalid = [&](const std::string& what) {
    return Status(Code::kInvalidArgument, fmt::format("{}: {}", name, what));
  };
  const ModelInfo& info = model.info();
  if (prompt.empty()) return invalid("no tokens");
  if (static_cast<int64_t>(prompt.size()) > info.max_positions) {
    return invalid(
        fmt::format("{} tokens do not fit in a context of {}", prompt.size(), info.max_positions));
  }
  for (size_t i = 0; i < prompt.size(); ++i) {
    if (prompt[i] < 0 || prompt[i] >= info.vocab_size) {
      return invalid(
          fmt::format("token {} is {}, expected 0..{}", i, prompt[i], info.vocab_size - 1));
    }
  }
  return {};
}

std::span<const int32_t> StopTokens(const Model& model, const GenerateOptions& options) {
  if (options.ignore_eos) return {};
  return options.stop_token_ids.empty() ? model.info().eos_token_ids : options.stop_token_ids;
}

}  // namespace marlin
