#include "backends/cuda/recurrent/chunked/chunk_plan.h"

#include <algorithm>

#include "backends/cuda/recurrent/chunked/chunk_layout.h"

namespace marlin::cuda {

bool ChunksPay(int64_t rows, int64_t sequences) {
  constexpr int64_t kLeastMoreRows = 64;
  return rows >= sequences + kLeastMoreRows;
}

int64_t MostChunks(int64_t rows, int64_t sequences) {
  // Every sequence in chunks may have one that is not full.
  const int64_t most_sequences = std::min(sequences, rows / (kMostRecurrentRows + 1));
  return (rows + (kChunkRows - 1) * most_sequences) / kChunkRows;
}

}  // namespace marlin::cuda
