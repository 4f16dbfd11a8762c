// What the kernels of blocks of 64 tokens x 64 outputs share: activations on their way to shared
// memory, the products of a warp, and what becomes of the sums.
//
//   C^T = W^T A^T with mma.m16n8k16.      tokens ->   0 .. 31      32 .. 63
//                                                   +------------+------------+
//   Four warps, each 32 outputs (a strip of   0..31 |   warp 0   |   warp 2   |
//   the tiles) x 32 tokens: 2 x 4 products          +------------+------------+
//   of 16 x 8.                          outputs ..63 |   warp 1   |   warp 3   |
//                                                   +------------+------------+
//   Activations lie in shared memory as [64 tokens][step of k], rows 16 bytes further apart than
//   they are long, so that the eight rows of an ldmatrix fall on different banks. Tokens beyond m
//   are neither copied nor multiplied, eight at a time.
#pragma once

#include "backends/cuda/async_copy.cuh"
#include "backends/cuda/block_gemm.h"
#include "backends/cuda/decode_fragment.cuh"
#include "backends/cuda/epilogue.cuh"
#include "backends/cuda/gemv_kernel.cuh"

namespace marlin::cuda {

MARLIN_HOST_DEVICE constexpr int RowBytesOfStep(int step) { return step * 2 + 16; }

/// Sums in shared memory, [tokens][outputs], on their way to the epilogue; rows so far apart that
/// the lanes of a store fall on different banks.
constexpr int kBlockSumStride = kBlockTile + 4;
constexpr int kBlockSumBytes = kBlockTile * kBlockSumStride * static_cast<int>(sizeof(float));

/// Copies `bytes` (0 to 16) and zeros the rest of 16; both sides aligned to 16.
MARLIN_DEVICE void CopyAsync16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
MARLIN_DEVICE void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `kLeft` groups of this thread's copies are under way.
template <int kLeft>
MARLIN_DEVICE void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

/// A thread's place in the block and what the block computes.
struct BlockPlace {
  int lane;
  int strip_of_block;  ///< Of this warp's outputs: 0 or 1.
  int first_token;     ///< Of the block.
  int first_output;
  int tokens;      ///< Of the block, 1 to 64.
  int eights;      ///< Of this warp's tokens, 0 to 4: products along tokens.
  int warp_token;  ///< The first of this warp's tokens in the block: 0 or 32.

  MARLIN_DEVICE BlockPlace(const BlockArguments& args, int64_t tile) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    strip_of_block = warp % 2;
    warp_token = warp / 2 * 32;
    first_token = static_cast<int>(tile % args.plan.token_tiles) * kBlockTile;
    first_output = static_cast<int>(tile / args.plan.token_tiles) * kBlockTile;
    tokens = min(kBlockTile, args.m - first_token);
    eights = min(max((tokens - warp_token + 7) / 8, 0), 4);
  }
  MARLIN_DEVICE int strip() const { return first_output / kStripOutputs + strip_of_block; }
};

/// Starts the copy of a step of the block's activations; what lies behind k becomes zero.
template <int kStep>
MARLIN_DEVICE void CopyTokens(const BlockArguments& args, const BlockPlace& place, int step,
                              uint32_t to) {
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

/// Sums of a warp: [16 outputs][8 tokens][register].
using BlockSums = float[2][4][4];

/// Adds the products of 32 k. `tokens` is where they begin in shared memory, `weights(j, r, pairs)`
/// gives the fragment of step j of 16 k and outputs 16 r of the warp's strip.
template <typename T, int kStep, typename Weights>
MARLIN_DEVICE void MultiplyBlock(uint32_t tokens, const BlockPlace& place, const Weights& weights,
                                 BlockSums& sums) {
  constexpr int kRowBytes = RowBytesOfStep(kStep);
  // Lane l gives ldmatrix the row of token l % 8 in matrix l / 8, which is of 8 k.
  const uint32_t row =
      tokens + (place.warp_token + (place.lane & 7)) * kRowBytes + (place.lane >> 3) * 16;
  uint32_t fragments[4][4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (e < place.eights) LoadMatrices(fragments[e], row + e * 8 * kRowBytes);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t pairs[4];
      weights(j, r, pairs);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < place.eights) {
          MultiplyAdd<T>(sums[r][e], pairs, fragments[e][2 * j], fragments[e][2 * j + 1]);
        }
      }
    }
  }
}

/// Finishes the block's sums, or stores them as slice `slice` of the partial ones. Both sides of
/// the call must be done with `shared`, which holds kBlockSumBytes.
MARLIN_DEVICE void FinishBlock(const BlockArguments& args, const BlockPlace& place, int slice,
                               const BlockSums& sums, float* shared) {
  const int output = place.strip_of_block * kStripOutputs + (place.lane >> 2);
  const int token = place.warp_token + (place.lane & 3) * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e >= place.eights) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        shared[(token + e * 8 + (i & 1)) * kBlockSumStride + output + r * 16 + (i >> 1) * 8] =
            sums[r][e][i];
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
    const float sum = shared[i / kBlockTile * kBlockSumStride + i % kBlockTile];
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
