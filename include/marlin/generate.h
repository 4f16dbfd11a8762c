// Text generation: autoregressive decoding with sampling, of one prompt or of a batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "marlin/model.h"
#include "marlin/sampling.h"
#include "marlin/speculation.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// Options of Generate.
struct GenerateOptions {
  int64_t max_tokens = 128;
  SamplingOptions sampling = {};
  /// Tokens that end generation; the stop token is not part of the result. Empty: the model's
  /// eos_token_ids.
  std::vector<int32_t> stop_token_ids = {};
  bool ignore_eos = false;  ///< Ignore stop tokens.
  /// Guesses tokens and verifies several in a pass. A Request has none, but SchedulerOptions.
  SpeculationOptions speculation = {};
};

/// Why generation ended. kCallback: a callback said so.
enum class StopReason : uint8_t { kMaxTokens, kStopToken, kContextFull, kCallback };
/// "max_tokens", "stop_token", "context_full", "stopped".
std::string_view StopReasonName(StopReason reason);

/// A generated text.
struct Generated {
  std::vector<int32_t> token_ids;  ///< The new tokens, without the prompt.
  StopReason stop_reason = StopReason::kMaxTokens;
  double prefill_seconds = 0;
  /// Time for all tokens after the first, without the callbacks. Where a device runs several
  /// steps per launch, and the text ends within one, the share of the steps that are part of it. Of
  /// a text of GenerateBatch or with speculation: the time from its first token to its last,
  /// whatever ran meanwhile.
  double decode_seconds = 0;
  DraftCounts drafts = {};  ///< Guesses of speculation.
};

/// Called with each token, in order, once the launch that sampled it is done (Model::Decode: up to
/// eight tokens); returning false ends generation. May be empty.
using TokenCallback = std::function<bool(int32_t token)>;

/// Generates a continuation of a prompt of at least one token. Errors: kInvalidArgument for an
/// option out of range, a prompt that exceeds the context or a token id out of range.
Result<Generated> Generate(const Model& model, std::span<const int32_t> prompt,
                           const GenerateOptions& options = {}, const TokenCallback& callback = {});

/// Generates a continuation of a prompt whose first sequence->length() tokens have been fed to the
/// sequence, as after an earlier turn of a conversation; only the others, at least one, are
/// fed. The sequence then holds prompt and continuation, without the last token and with tokens
/// that were decoded after the text had ended (Model::Decode): truncate it to what is wanted.
/// Without ModelOptions::batch_invariant logits may round differently than for a prompt fed at
/// once. Errors: as above; kInvalidArgument for a sequence that has the whole prompt.
Result<Generated> Generate(const Model& model, Sequence* sequence, std::span<const int32_t> prompt,
                           const GenerateOptions& options = {}, const TokenCallback& callback = {});

/// Options of GenerateBatch in addition to the options of its texts. The callbacks may be empty;
/// the calling thread calls them, between passes.
struct BatchOptions {
  /// Most sequences at a time. 0: as many as the KV cache has memory for, at most 256, or 32 where
  /// that memory is the host's. More than 512, or the tokens of the device's longest pass, count as
  /// that.
  int64_t max_batch = 0;
  /// Most tokens of prompts in one pass, next to decoding sequences; longer prompts take
  /// several passes. 0: as many as the device's longest pass has room for.
  int64_t prefill_tokens = 0;
  /// Called with each token of the text of prompts[index]; returning false ends that text.
  std::function<bool(size_t index, int32_t token)> token = {};
  /// Called with each text when it ends, which need not be in the order of the prompts.
  std::function<void(size_t index, const Generated& text)> ended = {};
  /// Called before every pass; returning true ends all texts, which keep the tokens that they have.
  std::function<bool()> stop = {};
};

/// Generates a continuation of every prompt, several at a time: the decode steps of all running
/// sequences and parts of new prompts share forward passes, and a prompt starts as soon as another
/// text has ended. With ModelOptions::batch_invariant each text has the bits that Generate gives
/// for it alone. When the KV cache's memory runs out, the sequence that started last is put back
/// and goes on later, after its tokens so far were fed again. `options` has one element for all
/// prompts or one for each; empty: the default. Errors: as Generate, naming the prompt as
/// prompts[index]; kOutOfMemory if a sequence alone does not fit.
Result<std::vector<Generated>> GenerateBatch(const Model& model,
                                             std::span<const std::vector<int32_t>> prompts,
                                             std::span<const GenerateOptions> options = {},
                                             const BatchOptions& batch = {});

}  // namespace marlin
#pragma GCC visibility pop
