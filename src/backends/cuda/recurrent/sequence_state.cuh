// A sequence's rows and its states before and after them.
#pragma once

#include "backends/cuda/attention/pages.cuh"
#include "backends/cuda/recurrent/recurrent_layout.h"

namespace marlin::cuda {

/// Records first_rows that do not ascend, and positions below -1. Called by all threads of a CTA.
MARLIN_DEVICE void CheckRows(const GatedDeltaArguments& args) {
  CheckFirstRows(args.sequences, args.errors);
  for (int row = static_cast<int>(threadIdx.x); row < args.sequences.rows;
       row += static_cast<int>(blockDim.x)) {
    const int position = args.sequences.positions[row];
    if (position < -1) RecordError(args.errors, ValueError::kRowPosition, position, row);
  }
}

struct SequenceState {
  int first_row = 0;
  int end_row = 0;
  const float* from = nullptr;  ///< Null: zeros.
  float* to = nullptr;          ///< Null: there is nothing to do.

  /// Records pages that do not exist. The same in all threads of a CTA.
  MARLIN_DEVICE SequenceState(const GatedDeltaArguments& args, int sequence) {
    const SequencesView& sequences = args.sequences;
    first_row = FirstRow(sequences, sequence);
    end_row = max(FirstRow(sequences, sequence + 1), first_row);
    const int32_t* const pages = sequences.block_tables + int64_t{2} * sequence;
    bool moves = false;
    for (int row = first_row; row < end_row && !moves; ++row) moves = sequences.positions[row] >= 0;
    // Without rows that take part a state is copied, if there is somewhere to.
    if (!moves && (pages[0] == pages[1] || pages[1] == -1)) return;
    if (pages[0] != -1) {
      from = Find(args, sequence, 0);
      if (from == nullptr) return;
    }
    to = Find(args, sequence, 1);
  }

 private:
  static MARLIN_DEVICE float* Find(const GatedDeltaArguments& args, int sequence, int which) {
    uint8_t* const page = PageOf(args.sequences, args.states, sequence, which);
    if (page == nullptr) {
      const int number = args.sequences.block_tables[int64_t{2} * sequence + which];
      RecordError(args.errors, ValueError::kStatePage, number, sequence);
    }
    return reinterpret_cast<float*>(page);
  }
};

}  // namespace marlin::cuda
