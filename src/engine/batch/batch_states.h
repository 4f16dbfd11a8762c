// Where the texts of a continuous batch publish their recurrent states, of models that have some.
#pragma once

#include <cstdint>

#include "engine/batch/batch_text.h"
#include "marlin/model.h"

namespace marlin {

/// The piece of a running text, or less: up to the next length at which its states are published.
int64_t PieceToState(const Model& model, const BatchText& text, int64_t piece);

/// Publishes a text's pages, and its states where that is due.
void PublishPages(const Model& model, BatchText* text);

}  // namespace marlin
