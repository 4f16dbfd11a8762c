// Drawing the next token from logits, on the device that computed them.
#pragma once

#include <cstdint>

#include "marlin/device.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

#pragma GCC visibility push(default)
namespace marlin {

/// Penalties change the logits first; then come the temperature, top_k, top_p and min_p.
struct SamplingOptions {
  float temperature = 0.0F;  ///< 0 takes the most likely token (the lowest id of equals).
  int64_t top_k = 0;         ///< Keeps the k most likely tokens; 0 keeps all.
  float top_p = 1.0F;        ///< Keeps the fewest most likely tokens whose sum reaches p.
  uint64_t seed = 0;         ///< Same seed, model, prompt and device: same tokens.
  /// Drops tokens less likely than this part of the most likely one.
  float min_p = 0.0F;
  /// Divides the logits of tokens that the prompt or the text has where they are positive, and
  /// multiplies them where they are not; 1: none.
  float repetition_penalty = 1.0F;
  float presence_penalty = 0.0F;   ///< Taken from the logits of tokens that have been drawn ...
  float frequency_penalty = 0.0F;  ///< ... and this as often as they have been.
};

/// Bytes of one text's sampler state: options, generator and token counts. Errors: kUnsupported.
Result<int64_t> SamplerStateBytes(const Device& device, int64_t vocab);

/// Writes the state of a text that begins with a prompt, i32 [tokens] (maybe none), in the device's
/// memory; state is u8 [SamplerStateBytes], aligned to 64 bytes. Errors: kInvalidArgument naming
/// the option or the token out of range (tokens: as for ids in decoder.h).
Status ResetSampler(const Device& device, const SamplingOptions& options, int64_t vocab,
                    const TensorView& prompt, const MutableTensorView& state,
                    void* stream = nullptr);

/// Draws one token for every row of logits f32 [rows, vocab] by its state, u8 [rows, bytes], and
/// moves the state on; tokens is i32 [rows]. All memory is the device's, so that a step can read
/// the token that the step before drew. Errors: kNonFiniteInput naming the token whose logit is NaN
/// or infinite (minus infinity is a token that cannot be, unless every one is), kInvalidArgument
/// for a state that ResetSampler did not write; from Synchronize where the device's memory is not
/// the host's. Tokens and states of such rows are undefined.
Status SampleTokens(const Device& device, const TensorView& logits, const MutableTensorView& states,
                    const MutableTensorView& tokens, void* stream = nullptr);

}  // namespace marlin
#pragma GCC visibility pop
