// Sampling the next token from logits, on the device that computed them.
#pragma once

#include <cstdint>

#include "marlin/device.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

#pragma GCC visibility push(default)
namespace marlin {

/// Applied in this order: penalties on the logits, temperature, top_k, top_p, min_p.
struct SamplingOptions {
  float temperature = 0.0F;  ///< 0: greedy (ties go to the lowest token id).
  int64_t top_k = 0;         ///< Keeps the k most likely tokens; 0 keeps all.
  float top_p = 1.0F;        ///< Nucleus sampling: keeps the smallest top set with mass >= p.
  uint64_t seed = 0;         ///< Same seed, model, prompt and device: same tokens.
  /// Drops tokens less likely than min_p times the most likely one.
  float min_p = 0.0F;
  /// For tokens in the prompt or the generated text: divides positive logits by this factor and
  /// multiplies the others by it; from 0.001 to 1000, 1: none.
  float repetition_penalty = 1.0F;
  /// Subtracted from the logits of generated tokens; from -1e6 to 1e6.
  float presence_penalty = 0.0F;
  /// Subtracted once per occurrence in the generated text; from -1e6 to 1e6.
  float frequency_penalty = 0.0F;
};

/// Bytes of one sequence's sampler state: options, random generator and token counts. Errors:
/// kInvalidArgument for a vocabulary size out of range, kUnsupported.
Result<int64_t> SamplerStateBytes(const Device& device, int64_t vocab);

/// Initializes the sampler state of a sequence with a prompt, i32 [tokens], which may be empty;
/// state is u8 [SamplerStateBytes], 64-byte aligned. Both are device memory. Errors:
/// kInvalidArgument naming the option or the token out of range (tokens are reported as ids are in
/// decoder.h).
Status ResetSampler(const Device& device, const SamplingOptions& options, int64_t vocab,
                    const TensorView& prompt, const MutableTensorView& state,
                    void* stream = nullptr);

/// Samples one token per row of logits f32 [rows, vocab] into tokens i32 [rows], and advances the
/// row's state, u8 [rows, SamplerStateBytes]. All views are device memory, so that a step can read
/// the token that the previous step sampled. Errors: kNonFiniteInput naming the token whose logit
/// is NaN or +infinity (-infinity excludes a token), or a row of only -infinity; kInvalidArgument
/// for a state that ResetSampler did not write; from Synchronize unless device memory is host
/// memory. Tokens and states of such rows are undefined.
Status SampleTokens(const Device& device, const TensorView& logits, const MutableTensorView& states,
                    const MutableTensorView& tokens, void* stream = nullptr);

/// Most tokens of a row that LogProbabilities ranks.
inline constexpr int64_t kMostLikelyTokens = 20;

/// Results of LogProbabilities, contiguous device memory.
struct LogProbabilityRows {
  MutableTensorView of_ids;  ///< f32 [rows]: of the row's id.
  /// i32 [rows, n]: the n most likely tokens, the most likely first, ties by the lower id.
  MutableTensorView likely_ids;
  MutableTensorView of_likely;  ///< f32 [rows, n]: of those.
};

/// The log-probability of one id per row, i32 [rows], and of the row's most likely tokens: the log
/// softmax of logits, f32 [rows, vocab]. The number n of these is 0 to the smaller of vocab and
/// kMostLikelyTokens. Negative ids have NaN. A row with a logit that is NaN or +infinity, or only
/// -infinity, has NaN, and -1 for its most likely tokens. All views are device memory. A row's
/// results do not depend on other rows. Errors: kInvalidArgument naming the view, and for an id
/// that is not below vocab, from Synchronize unless device memory is host memory.
Status LogProbabilities(const Device& device, const TensorView& logits, const TensorView& ids,
                        const LogProbabilityRows& out, void* stream = nullptr);

}  // namespace marlin
#pragma GCC visibility pop
