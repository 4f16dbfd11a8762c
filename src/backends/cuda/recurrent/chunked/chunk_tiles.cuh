// Chunks of sequences, and products of their parts on matrix units in tf32.
#pragma once

#include "backends/cuda/attention/pages.cuh"
#include "backends/cuda/common/warp_matrix.cuh"
#include "backends/cuda/recurrent/chunked/chunk_layout.h"

namespace marlin::cuda {

/// The chunks of a sequence; none if it runs row by row.
MARLIN_DEVICE int ChunksOf(const RecurrentArguments& args, int sequence) {
  if (sequence >= args.sequences.count) return 0;
  const int rows = FirstRow(args.sequences, sequence + 1) - FirstRow(args.sequences, sequence);
  return rows <= args.most_rows ? 0 : (rows + kChunkRows - 1) / kChunkRows;
}

/// A chunk of a sequence, by its number among the call's.
struct ChunkPlace {
  int sequence = -1;  ///< -1: no such chunk.
  int chunk = 0;      ///< Its number in the sequence.
};

/// Finds a chunk; a lane looks at a sequence. Called by all lanes of a warp.
MARLIN_DEVICE ChunkPlace FindChunk(const RecurrentArguments& args, int index) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  int before = 0;
  for (int first = 0; first < args.sequences.count; first += 32) {
    const int chunks = ChunksOf(args, first + lane);
    int through = chunks;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += other;
    }
    const int at = index - before - (through - chunks);
    const unsigned found = __ballot_sync(~0u, at >= 0 && at < chunks);
    before += __shfl_sync(~0u, through, 31);
    if (found == 0) continue;
    const int owner = __ffs(static_cast<int>(found)) - 1;
    return {first + owner, __shfl_sync(~0u, at, owner)};
  }
  return {};
}

/// The chunks of all sequences before one. Called by all lanes of a warp.
MARLIN_DEVICE int ChunksBefore(const RecurrentArguments& args, int sequence) {
  int chunks = 0;
  for (int s = static_cast<int>(threadIdx.x) & 31; s < sequence; s += 32) {
    chunks += ChunksOf(args, s);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) chunks += __shfl_xor_sync(~0u, chunks, step);
  return chunks;
}

/// An A fragment of 16 x 8 of a matrix in shared memory, `row` floats from a row to the next.
MARLIN_DEVICE void LoadRowsTf32(uint32_t (&a)[4], const float* matrix, int row) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const float* const at = matrix + (lane >> 2) * row + (lane & 3);
  a[0] = __float_as_uint(at[0]);
  a[1] = __float_as_uint(at[8 * row]);
  a[2] = __float_as_uint(at[4]);
  a[3] = __float_as_uint(at[8 * row + 4]);
}
/// The same of the transposed matrix.
MARLIN_DEVICE void LoadColumnsTf32(uint32_t (&a)[4], const float* matrix, int row) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const float* const at = matrix + (lane & 3) * row + (lane >> 2);
  a[0] = __float_as_uint(at[0]);
  a[1] = __float_as_uint(at[8]);
  a[2] = __float_as_uint(at[4 * row]);
  a[3] = __float_as_uint(at[4 * row + 8]);
}

/// sums[n-tile] += a * b[:, n-tile], b [8, 8 kTiles] in shared memory.
template <int kTiles>
MARLIN_DEVICE void MultiplyRows(float (&sums)[kTiles][4], const uint32_t (&a)[4], const float* b,
                                int row) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const float* const at = b + (lane & 3) * row + (lane >> 2);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    MultiplyAddTf32(sums[n], a, __float_as_uint(at[n * 8]), __float_as_uint(at[4 * row + n * 8]));
  }
}

}  // namespace marlin::cuda
