// Shared by the kernels with CTA tiles of 64 tokens x 64 outputs: async copies of activations, the
// arrangement of the warps, and the output of the sums.
//
//   C^T = W^T A^T with mma.m16n8k16.       tokens ->   0 .. 31      32 .. 63
//                                                    +------------+------------+
//   Four warps, two along outputs (an n-tile  0 .. 31|   warp 0   |   warp 2   |
//   of 32 each). The two warps of an n-tile          +------------+------------+
//   have half of the tokens each (drawn), or 32 .. 63|   warp 1   |   warp 3   |
//   all of them and half of every step's k.          +------------+------------+
//
//   Activations lie in shared memory as [64 tokens][k of a step], rows padded by 16 bytes so that
//   the eight rows of an ldmatrix fall on different banks. n8 tiles whose tokens are all beyond m
//   are neither copied nor multiplied.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/decode_fragment.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/common/warp_matrix.cuh"
#include "backends/cuda/gemm/block/block_launch.h"

namespace marlin::cuda {

MARLIN_HOST_DEVICE constexpr int RowBytesOfStep(int step) { return step * 2 + 16; }

/// Sums in shared memory before the epilogue, [tokens][outputs]; rows are padded so that the lanes
/// of a store fall on different banks.
constexpr int kBlockSumStride = kBlockTile + 4;
constexpr int kBlockSumBytes = kBlockTile * kBlockSumStride * static_cast<int>(sizeof(float));

/// A thread's position in the CTA, and the CTA's output tile. A warp has kN8Tiles MMA tiles along
/// tokens: 4 where two warps split the tokens, 8 where they split k.
template <int kN8Tiles>
struct BlockPlace {
  static constexpr bool kHalvesTokens = kN8Tiles == 4;
  int lane;
  int strip_of_block;  ///< This warp's n-tile in the CTA tile: 0 or 1.
  int half;            ///< This warp's half of the tokens or of k: 0 or 1.
  int first_token;     ///< Where the CTA tile begins.
  int first_output;
  int tokens;    ///< Tokens in the CTA tile, 1 to 64.
  int n8_tiles;  ///< This warp's n8 tiles that have tokens, 0 to kN8Tiles.

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
  /// This warp's first token in the CTA tile.
  MARLIN_DEVICE int warp_token() const { return kHalvesTokens ? half * kN8Tiles * 8 : 0; }
  MARLIN_DEVICE int strip() const { return first_output / kStripOutputs + strip_of_block; }
};

/// Accumulators of a warp: [tile of 16 outputs][n8 tile][register].
template <int kN8Tiles>
using BlockSums = float[2][kN8Tiles][4];

/// Starts the async copies of the CTA's activations for a step; elements beyond k become zero.
template <int kStep, int kN8Tiles>
MARLIN_DEVICE void CopyTokens(const BlockArguments& args, const BlockPlace<kN8Tiles>& place,
                              int step, uint32_t to) {
  constexpr int kChunks = kStep / 8;  // 16-byte chunks per row.
  const int rows = (place.tokens + 7) / 8 * 8;
#pragma unroll
  for (int i = 0; i < kBlockTile * kChunks / kBlockThreads; ++i) {
    const int chunk = static_cast<int>(threadIdx.x) + i * kBlockThreads;
    const int row = chunk / kChunks;
    if (row >= rows) break;
    const int k = step * kStep + chunk % kChunks * 8;
    const int bytes = row < place.tokens ? min(max(args.k - k, 0), 8) * 2 : 0;
    // The address stays in range even where nothing is read.
    const int64_t at = bytes > 0 ? (place.first_token + row) * args.a_stride + k : 0;
    CopyAsync16(to + row * RowBytesOfStep(kStep) + chunk % kChunks * 16,
                static_cast<const uint8_t*>(args.a) + at * 2, bytes);
  }
}

/// Applies the epilogue to the CTA's sums, or stores them as slice `slice` of the split-K partials.
/// `shared` must be free before the call and is free after it. It holds kBlockSumBytes, or twice
/// that where warps split k: their sums are added in the order of the warps.
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
  // Not unrolled: the epilogue is long, and unrolled it would not fit the instruction cache.
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
