// Common parts of mixers whose sequences keep a recurrent state.
#pragma once

#include <cstdint>
#include <functional>

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
/// The rows of a pass that a recurrent operation takes in one call.
struct PassTurn {
  /// These rows, and the pages of their sequences' states. In several steps of one recording, rows
  /// that have ended do not take part.
  RecurrentRows rows;
  int64_t first = 0;   ///< The first row's index in the pass.
  int64_t stride = 1;  ///< From a row to the next.

  /// The turn's rows of a matrix that has all rows of the pass.
  MutableTensorView Rows(const MutableTensorView& matrix) const;
  /// The same as heads, [rows, heads, dim].
  MutableTensorView Heads(const MutableTensorView& matrix, int64_t heads, int64_t dim) const;
};
/// Runs a recurrent operation of a layer: of all rows at once or, where guesses among them need
/// states of their own, turn by turn.
Status ForEachTurn(const Pass& pass, int64_t layer,
                   const std::function<Status(const PassTurn&)>& run);
/// A layer's states, of MixerState::fixed elements each.
RecurrentStates StatesOf(const Pass& pass, int64_t layer);

}  // namespace marlin
