// What the kernels of blocks of 64 tokens x 64 outputs share: activations on their way to shared
// memory, a warp's place, and what becomes of the sums.
//
//   C^T = W^T A^T with mma.m16n8k16.       tokens ->   0 .. 31      32 .. 63
//                                                    +------------+------------+
//   Four warps, two along outputs (a strip    0 .. 31|   warp 0   |   warp 2   |
//   of the tiles each). Of the other two             +------------+------------+
//   each has half of the tokens (drawn), or  32 .. 63|   warp 1   |   warp 3   |
//   all of them and half of every step's k.          +------------+------------+
//
//   Activations lie in shared memory as [64 tokens][step of k], rows 16 bytes further apart than
//   they are long, so that the eight rows of an ldmatrix fall on different banks. Tokens beyond m
//   are neither copied nor multiplied, eight at a time.
#pragma once

#include "backends/cuda/kernels/block/block_launch.h"
#include "backends/cuda/kernels/common/async_copy.cuh"
#include "backends/cuda/kernels/common/decode_fragment.cuh"
#include "backends/cuda/kernels/common/epilogue.cuh"
#include "backends/cuda/kernels/common/warp_matrix.cuh"

namespace marlin::cuda {

MARLIN_HOST_DEVICE constexpr int RowBytesOfStep(int step) { return step * 2 + 16; }

/// Sums in shared memory, [tokens][outputs], on their way to the epilogue; rows so far apart that
/// the lanes of a store fall on different banks.
constexpr int kBlockSumStride = kBlockTile + 4;
constexpr int kBlockSumBytes = kBlockTile * kBlockSumStride * static_cast<int>(sizeof(float));

MARLIN_DEVICE void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `kLeft` groups of this thread's copies are under way.
template <int kLeft>
MARLIN_DEVICE void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

/// A thread's place in the block and what the block computes. kN8Tiles of a warp's products along
/// tokens, of 8 each: 4 where two warps share the tokens, 8 where they share k.
template <int kN8Tiles>
struct BlockPlace {
  static constexpr bool kHalvesTokens = kN8Tiles == 4;
  int lane;
  int strip_of_block;  ///< Of this warp's outputs: 0 or 1.
  int half;            ///< Of the tokens or of k: 0 or 1.
  int first_token;     ///< Of the block.
  int first_output;
  int tokens;    ///< Of the block, 1 to 64.
  int n8_tiles;  ///< That have tokens, 0 to kN8Tiles.

  MARLIN_DEVICE BlockPlace(const BlockArguments& args, int64_t tile) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    strip_of_block = warp % 2;
    half = warp / 2;
    first_token = static_cast<int>(tile % args.plan.token_tiles) * kBlockTile;
    first_output = static_cast<int>(tile / args.plan.token_tiles) * kBlockTile;
    tokens = min(kBlockTile, args.m - first_token);
    n8_tiles = min(max((tokens - warp_token() + 7) / 8, 0), kN8Tiles);
  }
  /// The first of this warp's tokens in the block.
  MARLIN_DEVICE int warp_token() const { return kHalvesTokens ? half * kN8Tiles * 8 : 0; }
  MARLIN_DEVICE int strip() const { return first_output / kStripOutputs + strip_of_block; }
};

/// Sums of a warp: [16 outputs][8 tokens][register].
template <int kN8Tiles>
using BlockSums = float[2][kN8Tiles][4];

/// Starts the copy of a step of the block's activations; what lies behind k becomes zero.
template <int kStep, int kN8Tiles>
MARLIN_DEVICE void CopyTokens(const BlockArguments& args, const BlockPlace<kN8Tiles>& place,
                              int step, uint32_t to) {
  constexpr int kChunks = kStep / 8;  // Of a row, 16 bytes each.
  const int rows = (place.tokens + 7) / 8 * 8;
#pragma unroll
  for (int i = 0; i < kBlockTile * kChunks / kBlockThreads; ++i) {
    const int chunk = static_cast<int>(threadIdx.x) + i * kBlockThreads;
    const int row = chunk / kChunks;
    if (row >= rows) break;
    const int k = step * kStep + chunk % kChunks * 8;
    const int bytes = row < place.tokens ? min(max(args.k - k, 0), 8) * 2 : 0;
    // An address in range even where nothing is read.
    const int64_t at = bytes > 0 ? (place.first_token + row) * args.a_stride + k : 0;
    CopyAsync16(to + row * RowBytesOfStep(kStep) + chunk % kChunks * 16,
                static_cast<const uint8_t*>(args.a) + at * 2, bytes);
  }
}

/// Finishes the block's sums, or stores them as slice `slice` of the partial ones. Both sides of
/// the call must be done with `shared`, which holds kBlockSumBytes, or that twice where warps share
/// k: their sums are added in that order.
template <int kN8Tiles>
MARLIN_DEVICE void FinishBlock(const BlockArguments& args, const BlockPlace<kN8Tiles>& place,
                               int slice, const BlockSums<kN8Tiles>& sums, float* shared) {
  constexpr bool kHalvesK = !BlockPlace<kN8Tiles>::kHalvesTokens;
  constexpr int kHalf = kBlockTile * kBlockSumStride;
  float* mine = shared + (kHalvesK ? place.half * kHalf : 0) +
                (place.warp_token() + (place.lane & 3) * 2) * kBlockSumStride +
                place.strip_of_block * kStripOutputs + (place.lane >> 2);
#pragma unroll
  for (int e = 0; e < kN8Tiles; ++e) {
    if (e >= place.n8_tiles) break;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mine[(e * 8 + (i & 1)) * kBlockSumStride + r * 16 + (i >> 1) * 8] = sums[r][e][i];
      }
    }
  }
  __syncthreads();
  // Rolled up: the epilogue is long, and unrolled would not stay in the instruction cache.
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < place.tokens * kBlockTile; i += kBlockThreads) {
    const int m = place.first_token + i / kBlockTile;
    const int n = place.first_output + i % kBlockTile;
    if (n >= args.epilogue.n) continue;
    const float* at = shared + i / kBlockTile * kBlockSumStride + i % kBlockTile;
    const float sum = kHalvesK ? at[0] + at[kHalf] : at[0];
    if (args.partials == nullptr) {
      Finish(args.epilogue, m, n, sum);
    } else {
      const int64_t row = static_cast<int64_t>(slice) * args.m + m;
      __stcg(args.partials + row * args.epilogue.n + n, sum);
    }
  }
  __syncthreads();
}

}  // namespace marlin::cuda
