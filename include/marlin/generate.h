// Text generation: autoregressive decoding with sampling.
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

/// Options of Generate.
struct GenerateOptions {
  int64_t max_tokens = 128;
  SamplingOptions sampling = {};
  /// Tokens that end generation; the stop token is not part of the result. Empty: the model's
  /// eos_token_ids.
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;  ///< Ignore stop tokens.
};

/// Why generation ended.
enum class StopReason : uint8_t { kMaxTokens, kStopToken, kContextFull, kCallback };
/// "max_tokens", "stop_token", "context_full", "stopped".
std::string_view StopReasonName(StopReason reason);

/// The result of Generate.
struct Generated {
  std::vector<int32_t> token_ids;  ///< The new tokens, without the prompt.
  StopReason stop_reason = StopReason::kMaxTokens;
  double prefill_seconds = 0;
  /// Time for all tokens after the first, without that of callbacks. Where a device runs several
  /// steps per launch, and the text ends within one, the share of the steps that are part of it.
  double decode_seconds = 0;
};

/// Called with each token, in order, once the launch that sampled it is done (Model::Decode: up to
/// eight tokens); returning false ends generation. May be empty.
using TokenCallback = std::function<bool(int32_t token)>;

/// Generates a continuation of a prompt of at least one token. Errors: kInvalidArgument for an
/// option out of range, a prompt that exceeds the context or a token id out of range.
Result<Generated> Generate(const Model& model, std::span<const int32_t> prompt,
                           const GenerateOptions& options = {}, const TokenCallback& callback = {});

}  // namespace marlin
#pragma GCC visibility pop
