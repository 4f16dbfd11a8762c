// Common parts of mixers whose sequences keep a recurrent state.
#pragma once

#include <cstdint>

#include "engine/forward.h"
#include "marlin/recurrent.h"

namespace marlin {

/// The rows of a pass and the pages of their sequences' states. In several steps of one recording,
/// rows that have ended do not take part.
RecurrentRows RecurrentRowsOf(const Pass& pass, int64_t layer);
/// A layer's states, of MixerState::fixed elements each.
RecurrentStates StatesOf(const Pass& pass, int64_t layer);

}  // namespace marlin
