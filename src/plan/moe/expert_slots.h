// The selections of some tokens, sorted by expert.
#pragma once

#include <cstdint>

#include "marlin/status.h"
#include "plan/moe/experts.h"

namespace marlin {

/// The number of an expert's row is a slot: slots are sorted by expert, and within an expert by
/// token, so that every expert's rows are consecutive. The shared expert comes last, with a slot
/// for every token. The arrays are the caller's.
struct ExpertSlots {
  int64_t experts = 0;       ///< Without the shared one.
  int32_t* begin = nullptr;  ///< [experts + 2] the first slot of each expert, plus an end.
  int32_t* token = nullptr;  ///< [slots]
  float* weight = nullptr;   ///< [slots]; the shared expert's are the caller's to fill.
  int32_t* slot_of =
      nullptr;  ///< [tokens, top_k]: the slot of a selection, -1: no such expert here.

  int64_t slots() const { return begin[experts + 1]; }
};

/// The selections of `tokens` tokens, from token `first` on, which only messages mention.
struct Selections {
  const int32_t* ids;    ///< [tokens, top_k]
  const float* weights;  ///< [tokens, top_k]
  int64_t tokens;
  int64_t top_k;
  int64_t first;
};

/// One of a token's selections.
struct SelectionPlace {
  int64_t token;
  int64_t selection;
};

/// The error of an id that is none of `experts` experts.
Status WrongExpert(SelectionPlace place, int32_t id, int64_t experts);

/// Sorts the selections of a layer's experts. Errors: kInvalidArgument for an id that is no expert.
Status SortByExpert(const Selections& selections, const LayerExperts& layer,
                    const ExpertSlots& slots);

}  // namespace marlin
