// The passes of a continuous batch, and the tokens that they sample.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/batch/batch_slots.h"
#include "engine/batch/batch_text.h"
#include "marlin/model.h"
#include "marlin/scheduler.h"
#include "marlin/status.h"

namespace marlin {

/// The results of a text that a pass has sampled.
struct SampledText {
  BatchText* text = nullptr;
  std::vector<int32_t> tokens = {};
  Status error = {};                         ///< Why there is no token after these; ok: no error.
  std::vector<TokenLogprobs> logprobs = {};  ///< One per token, if the text asks for them.
};

/// Samples the next tokens of texts that all decode and have slots: several, if the device takes
/// more than one step per pass. A stop token of another text ends a row, but not its text. Errors:
/// as Model::Decode; the tokens of steps before the error are there.
Status DecodeTexts(const Model& model, const BatchSlots& slots, std::vector<SampledText>* sampled);

/// Feeds the pieces and drafts of the texts that have some, and samples each text that then has no
/// more. Adds the log-probabilities of prompts to their texts. Errors: as Model::ForwardAndSample.
Status FeedTexts(const Model& model, const BatchSlots& slots, std::span<BatchText* const> running,
                 std::vector<SampledText>* sampled);

}  // namespace marlin
