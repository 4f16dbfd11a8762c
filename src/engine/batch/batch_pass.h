// The passes of a continuous batch, and the tokens that they sample.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/batch/batch_slots.h"
#include "engine/batch/batch_text.h"
#include "engine/speculation/draft_control.h"
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

/// Runs a pass of the texts that have pieces, and samples each text that then has no more to feed:
/// several tokens of each, if all decode and the device takes more than one step per pass. A stop
/// token of another text ends a row, but not its text. Adds the log-probabilities of prompts to
/// their texts, and the pass's time to `costs` if all decode. Errors: as Model::Decode and
/// Model::ForwardAndSample; the tokens of steps before the error are there.
Status RunTexts(const Model& model, const BatchSlots& slots, std::span<BatchText* const> running,
                DraftCosts* costs, std::vector<SampledText>* sampled);

}  // namespace marlin
