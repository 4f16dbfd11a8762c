// Guessed tokens in the passes of a continuous batch.
#pragma once

#include <cstdint>
#include <span>

#include "engine/batch/batch_text.h"
#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin {

/// Guesses tokens of the texts that decode and may be guessed, and takes their pages. Only while a
/// pass has few rows: then drafts cost little. `room`: the tokens that fit into the pass. Errors:
/// as LayerDrafts, except kOutOfMemory.
Status AddDrafts(const Model& model, std::span<BatchText* const> running, int64_t room);

}  // namespace marlin
