// Guessed tokens in the passes of a continuous batch.
#pragma once

#include <cstdint>
#include <span>

#include "engine/batch/batch_slots.h"
#include "engine/batch/batch_text.h"
#include "engine/speculation/draft_control.h"
#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin {

/// Guesses tokens of the texts that decode and may be guessed, as many as are worth their cost, and
/// takes their pages. `room`: the tokens that fit into the pass. Errors: as Drafter, except for
/// memory that runs out and logits of a draft that are not finite: then nothing is guessed.
Status AddDrafts(const Model& model, const BatchSlots& slots, std::span<BatchText* const> running,
                 int64_t room, DraftCosts* costs);

}  // namespace marlin
