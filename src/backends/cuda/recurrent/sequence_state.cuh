// A sequence's rows and its states before and after them.
#pragma once

#include "backends/cuda/attention/pages.cuh"
#include "backends/cuda/recurrent/recurrent_layout.h"

namespace marlin::cuda {

/// The state of a sequence before (0) or after (1) its rows; null if there is none. Reads the page
/// from L2, where an earlier kernel may write it.
MARLIN_DEVICE float* FindState(const RecurrentArguments& args, int sequence, int which) {
  const int page = __ldcg(args.sequences.block_tables + int64_t{2} * sequence + which);
  if (page < 0) return nullptr;
  const PagesView& pages = args.states;
  const auto number = static_cast<uint32_t>(page);
  const uint32_t slab = number / pages.slab_pages;
  if (slab >= static_cast<uint32_t>(pages.slab_count)) return nullptr;
  auto* const data =
      static_cast<float*>(pages.more_slabs != nullptr ? pages.more_slabs[slab] : pages.slabs[slab]);
  if (data == nullptr) return nullptr;
  return data + (number - slab * pages.slab_pages) * pages.page_stride + pages.first_element;
}

struct SequenceState {
  int first_row = 0;
  int end_row = 0;
  const float* from = nullptr;  ///< Null: zeros.
  float* to = nullptr;          ///< Null: there is nothing to do.

  /// Records pages that do not exist. The same in all threads of a CTA.
  MARLIN_DEVICE SequenceState(const RecurrentArguments& args, int sequence) {
    const SequencesView& sequences = args.sequences;
    first_row = FirstRow(sequences, sequence);
    end_row = max(FirstRow(sequences, sequence + 1), first_row);
    const int32_t* const pages = sequences.block_tables + int64_t{2} * sequence;
    bool moves = false;
    for (int row = first_row; row < end_row && !moves; ++row) moves = sequences.positions[row] >= 0;
    // Without rows that take part a state is copied, if there is somewhere to.
    if (!moves && (pages[0] == pages[1] || pages[1] == -1)) return;
    from = FindState(args, sequence, 0);
    float* const after = FindState(args, sequence, 1);
    const bool begins = pages[0] == -1;
    if (after != nullptr && (from != nullptr || begins)) {
      to = after;
    } else {
      const int which = from == nullptr && !begins ? 0 : 1;
      RecordError(args.errors, ValueError::kStatePage, pages[which], sequence);
    }
  }

  /// Whether the sequence runs in chunks, not row by row.
  MARLIN_DEVICE bool InChunks(const RecurrentArguments& args) const {
    return args.most_rows >= 0 && end_row - first_row > args.most_rows;
  }
};

}  // namespace marlin::cuda
