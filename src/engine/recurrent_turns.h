// How a pass with guesses divides the rows of recurrent operations, so that every guess has states
// of its own.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/mixer.h"

namespace marlin {

/// A turn (RecurrentTurn) of consecutive sequences of a pass: all of their rows, or of each, if
/// `row` is not kAllRows, that one.
struct PlannedTurn {
  static constexpr int64_t kAllRows = -1;

  size_t first_sequence = 0;
  size_t sequences = 0;
  int64_t first = 0;
  int64_t rows = 0;
  int64_t stride = 1;
  int64_t row = kAllRows;
};

/// The turns of a pass: one for neighbors without guesses; for neighbors with as many guesses one
/// for each of their rows. A row's turn follows the turn of the row before it in its sequence.
std::vector<PlannedTurn> PlanTurns(std::span<const PassSequence> sequences);
/// RecurrentTurn::first_rows of a turn.
std::vector<int32_t> FirstRowsOf(const PlannedTurn& turn, std::span<const PassSequence> sequences);

}  // namespace marlin
