// Continuing a text: sampling one token after another.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "marlin/model.h"
#include "marlin/sampling.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

struct GenerateOptions {
  int64_t max_tokens = 128;
  SamplingOptions sampling = {};
  /// Ends the text when drawn; the token is not part of the result. Empty: the model's own.
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;  ///< Goes on past stop tokens.
};

enum class StopReason : uint8_t { kMaxTokens, kStopToken, kContextFull, kCallback };
/// "max_tokens", "stop_token", "context_full", "stopped".
std::string_view StopReasonName(StopReason reason);

struct Generated {
  std::vector<int32_t> token_ids;
  StopReason stop_reason = StopReason::kMaxTokens;
  double prefill_seconds = 0;
  double decode_seconds = 0;  ///< Of all tokens after the first.
};

/// Called with each token as it is drawn; returning false ends the text. May be empty.
using TokenCallback = std::function<bool(int32_t token)>;

/// Continues a prompt of at least one token. Errors: kInvalidArgument naming the option out of
/// range, a prompt that does not fit in the context, a token id out of range.
Result<Generated> Generate(const Model& model, std::span<const int32_t> prompt,
                           const GenerateOptions& options = {}, const TokenCallback& callback = {});

}  // namespace marlin
#pragma GCC visibility pop
