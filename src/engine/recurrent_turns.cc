#include "engine/recurrent_turns.h"

namespace marlin {

std::vector<PlannedTurn> PlanTurns(std::span<const PassSequence> sequences) {
  std::vector<PlannedTurn> turns;
  int64_t first = 0;
  for (size_t at = 0; at < sequences.size();) {
    const int64_t drafts = sequences[at].drafts;
    PlannedTurn turn{.first_sequence = at, .first = first};
    for (; at < sequences.size() && sequences[at].drafts == drafts; ++at) {
      ++turn.sequences;
      turn.rows += sequences[at].rows;
    }
    first += turn.rows;
    if (drafts == 0) {
      turns.push_back(turn);
      continue;
    }
    turn.rows = static_cast<int64_t>(turn.sequences);
    turn.stride = 1 + drafts;
    for (turn.row = 0; turn.row <= drafts; ++turn.row, ++turn.first) turns.push_back(turn);
  }
  return turns;
}

std::vector<int32_t> FirstRowsOf(const PlannedTurn& turn, std::span<const PassSequence> sequences) {
  std::vector<int32_t> first_rows = {0};
  for (const PassSequence& sequence : sequences.subspan(turn.first_sequence, turn.sequences)) {
    const int64_t rows = turn.row == PlannedTurn::kAllRows ? sequence.rows : 1;
    first_rows.push_back(first_rows.back() + static_cast<int32_t>(rows));
  }
  return first_rows;
}

}  // namespace marlin
