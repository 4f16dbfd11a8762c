// Common parts of mixers whose sequences keep a recurrent state.
#pragma once

#include <cstdint>

#include "engine/forward.h"
#include "marlin/recurrent.h"

namespace marlin {

/// The widest causal convolution that the operations take.
inline constexpr int64_t kMaxConvWidth = 16;

/// f32 [rows, projection.out] = the projection of a layer's normalized hidden states, in the pass's
/// arena.
Result<MutableTensorView> ProjectHidden(Pass& pass, int64_t layer, const Projection& projection);
/// The weights of a causal convolution, [channels, width].
TensorView ConvWeights(const DeviceVector& conv, int64_t channels, int64_t width);
/// The rows of a pass and the pages of their sequences' states. In several steps of one recording,
/// rows that have ended do not take part.
RecurrentRows RecurrentRowsOf(const Pass& pass, int64_t layer);
/// A layer's states, of MixerState::fixed elements each.
RecurrentStates StatesOf(const Pass& pass, int64_t layer);

}  // namespace marlin
