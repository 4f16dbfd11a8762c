// Plans a call of Mamba2: a pure function of the shapes that the host knows.
#pragma once

#include <cstdint>

#include "marlin/gemm.h"
#include "marlin/recurrent.h"

namespace marlin::cuda {

struct Mamba2Plan {
  /// Value features of a CTA of the recurrence row by row. Results do not depend on it.
  int slice_columns = 0;
  bool chunks = false;      ///< Sequences of more than kMostRecurrentRows rows run in chunks.
  int64_t most_chunks = 0;  ///< Chunks of all sequences together.
  int64_t part_bytes = 0;   ///< The parts of a turn's chunks.
};

/// `quads`: HasQuads of the states, which chunks need.
Mamba2Plan PlanMamba2(const Mamba2Sizes& sizes, int64_t rows, int64_t sequences, bool quads,
                      Determinism determinism, int multiprocessors);

}  // namespace marlin::cuda
