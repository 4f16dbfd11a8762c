// The hidden states that the inputs of a call give and ask for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/forward.h"
#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin {

/// Tokens of an input that are fed in one pass.
struct PassChunk {
  size_t input;
  int64_t first;  ///< Index among the input's tokens.
  int64_t count;
};

/// Copies SequenceInput::hidden of the pass's rows to Pass::previous, and takes the values that
/// SequenceInput::hidden_out asks for. Call it before the step runs. Errors: kOutOfMemory.
Status GiveHidden(std::span<const SequenceInput> inputs, std::span<const PassChunk> chunks,
                  Pass* pass);

/// Copies StepValues::hidden_out to SequenceInput::hidden_out. A draft takes these: vLLM and SGLang
/// give their MTP layers the hidden states after the model's final norm, and, in SGLang's
/// DeepseekModelNextN and vLLM's Qwen3NextMultiTokenPredictor, those after the layer's own norm to
/// the next draft. (vLLM's DeepSeekMultiTokenPredictorLayer gives it the hidden states without that
/// norm.)
Status FetchHidden(std::span<const SequenceInput> inputs, std::span<const PassChunk> chunks,
                   Pass* pass);

}  // namespace marlin
