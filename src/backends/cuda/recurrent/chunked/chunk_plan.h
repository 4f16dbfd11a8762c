// Which sequences of recurrent states run in chunks, from the shapes that the host knows.
#pragma once

#include <cstdint>

namespace marlin::cuda {

/// Chunks pay where some sequence has many rows, which the host does not know: where there are many
/// more rows than sequences.
bool ChunksPay(int64_t rows, int64_t sequences);

/// The chunks of the sequences with more than kMostRecurrentRows rows, at most.
int64_t MostChunks(int64_t rows, int64_t sequences);

}  // namespace marlin::cuda
