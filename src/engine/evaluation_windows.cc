#include "engine/evaluation_windows.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/errors.h"
#include "base/macros.h"
#include "engine/model_impl.h"

namespace marlin {
namespace {

/// Most bytes of logits in memory at once, and most tokens per forward pass.
constexpr int64_t kLogitBytes = int64_t{256} << 20;
constexpr int64_t kTokensAtOnce = 512;

}  // namespace

Status CheckEvaluation(const Model& model, std::span<const int32_t> tokens,
                       const EvaluateOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckModel("model", model));
  if (tokens.size() < 2) {
    return Invalid(fmt::format("tokens: expected at least 2, got {}", tokens.size()));
  }
  if (options.window < 1 || options.window > model.info().max_positions) {
    return Invalid(fmt::format("window: expected 1..{} (the context), got {}",
                               model.info().max_positions, options.window));
  }
  if (options.stride < 0 || options.stride > options.window) {
    return Invalid(
        fmt::format("stride: expected 0..{} (the window), got {}", options.window, options.stride));
  }
  if (options.max_windows < 0) {
    return Invalid(fmt::format("max_windows: expected 0 or more, got {}", options.max_windows));
  }
  return {};
}

Status CheckTargets(const Model& model, std::span<const int32_t> tokens) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= model.info().vocab_size) {
      return Invalid(fmt::format("tokens: token {} is {}, expected 0..{}", i, tokens[i],
                                 model.info().vocab_size - 1));
    }
  }
  return {};
}

std::vector<Window> EvaluationWindows(int64_t tokens, const EvaluateOptions& options) {
  const int64_t stride = options.stride == 0 ? options.window : options.stride;
  std::vector<Window> windows;
  for (int64_t first = 0; first + options.window < tokens; first += stride) {
    windows.push_back({first, options.window, first == 0 ? 0 : options.window - stride});
  }
  if (windows.empty()) windows.push_back({0, tokens - 1, 0});
  if (options.max_windows > 0 && static_cast<int64_t>(windows.size()) > options.max_windows) {
    windows.resize(static_cast<size_t>(options.max_windows));
  }
  return windows;
}

int64_t MostEvaluatedRows(const Model& model) {
  const int64_t row_bytes = model.info().vocab_size * int64_t{sizeof(float)};
  return std::clamp<int64_t>(kLogitBytes / row_bytes, 1, kTokensAtOnce);
}

}  // namespace marlin
