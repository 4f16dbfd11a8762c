// The epilogue of the MMA kernels, and split-K among the CTAs of an output tile.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/gemm/mma/mma_layout.h"

namespace marlin::cuda {

/// Adds the sums of all CTAs that split an output tile's k, in the order of k. Every CTA stores its
/// sums; the one with the last ticket reads all of them and returns true, the others return false.
/// `exchange`: a word of shared memory that has no other use meanwhile.
template <int kTokens>
MARLIN_DEVICE bool AddSplits(const MmaArguments& args, int item, int split, uint32_t* exchange,
                             float (&acc)[kTokens / 8][2][4]) {
  constexpr int kVectors = kTokens / 4;  ///< Four sums each, per thread.
  const auto threads = static_cast<int>(blockDim.x);
  const int64_t stride = int64_t{threads} * kVectors;
  auto* const of_item = reinterpret_cast<float4*>(args.parts) + item * args.splits * stride;
  float4* const mine = of_item + split * stride + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const float(&sums)[4] = acc[i / 2][i % 2];
    __stcg(mine + i * threads, make_float4(sums[0], sums[1], sums[2], sums[3]));
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* const counter = args.tile_counters + item;
    // The first ticket is all ones, the last leaves the counter as it was.
    const uint32_t ticket = IncrementTileCounter(counter) + 1;
    const bool last = ticket == static_cast<uint32_t>(args.splits) - 1;
    if (last) *counter = ~0u;
    __threadfence();
    *exchange = last ? 1 : 0;
  }
  __syncthreads();
  if (*exchange == 0) return false;
  const float4* const first = of_item + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const float4 v = __ldcg(first + i * threads);
    float(&sums)[4] = acc[i / 2][i % 2];
    sums[0] = v.x;
    sums[1] = v.y;
    sums[2] = v.z;
    sums[3] = v.w;
  }
#pragma unroll 1
  for (int s = 1; s < args.splits; ++s) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 v = __ldcg(first + s * stride + i * threads);
      float(&sums)[4] = acc[i / 2][i % 2];
      sums[0] += v.x;
      sums[1] += v.y;
      sums[2] += v.z;
      sums[3] += v.w;
    }
  }
  // Before the word is overwritten.
  __syncthreads();
  return true;
}

/// Puts the sums of kMmaExchangeTokens tokens into shared memory, [token][MmaExchangeStride]; the
/// loop makes register indices constants.
template <int kOctets>
MARLIN_DEVICE void PutSums(const float (&acc)[kOctets][2][4], int chunk, int warps,
                           float* exchange) {
  constexpr int kGroups = kMmaExchangeTokens / 8;  ///< n8 tiles of tokens at a time.
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int stride = MmaExchangeStride(warps);
  float* const to = exchange + (lane & 3) * 2 * stride + warp * kStripOutputs + (lane >> 2);
#pragma unroll
  for (int c = 0; c < kOctets / kGroups; ++c) {
    if (c != chunk) continue;
#pragma unroll
    for (int o = 0; o < kGroups; ++o) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        // Sum e % 4 of 16 outputs e / 4.
        to[(o * 8 + (e & 1)) * stride + (e >> 2) * 16 + (e >> 1 & 1) * 8] =
            acc[c * kGroups + o][e >> 2][e & 3];
      }
    }
  }
}

/// Stores the sums of an output tile through shared memory, kMmaExchangeTokens tokens at a time, so
/// that a warp stores adjacent outputs of a token, and gates meet their ups. In rolled loops:
/// unrolled this code would be larger than the mainloop.
template <int kTokens>
struct MmaEpilogue {
  const MmaArguments& args;
  const MmaItem& item;
  int split;
  float* exchange;  ///< [kMmaExchangeTokens][MmaExchangeStride]

  /// All threads of the CTA take part; the pipeline must have been read by all of them.
  MARLIN_DEVICE void Run(const float (&acc)[kTokens / 8][2][4]) const {
#pragma unroll 1
    for (int chunk = 0; chunk < kTokens / kMmaExchangeTokens; ++chunk) {
      const int first_m = item.token_tile * kTokens + chunk * kMmaExchangeTokens;
      if (first_m >= args.m) break;
      PutSums(acc, chunk, Warps(), exchange);
      __syncthreads();
      if (args.half_strips != 0) {
        StoreGated(first_m);
      } else {
        StorePairs(first_m);
      }
      __syncthreads();
    }
  }

 private:
  static MARLIN_DEVICE int Thread() { return static_cast<int>(threadIdx.x); }
  static MARLIN_DEVICE int Warps() { return static_cast<int>(blockDim.x) >> 5; }

  /// Two outputs of a token at a time.
  MARLIN_DEVICE void StorePairs(int first_m) const {
    const EpilogueView& view = args.epilogue;
    const int pairs = Warps() * kStripOutputs / 2;
    const int stride = MmaExchangeStride(Warps());
    const int pair = Thread() % pairs;
    const int n = item.block * pairs * 2 + pair * 2;
    if (n >= view.n) return;
    const bool both = n + 1 < view.n;
#pragma unroll 1
    for (int token = Thread() / pairs; token < kMmaExchangeTokens; token += 2) {
      const int m = first_m + token;
      if (m >= args.m) break;
      const float2 sum = *reinterpret_cast<const float2*>(exchange + token * stride + pair * 2);
      if (args.partials != nullptr) {
        float* const to = args.partials + (int64_t{split} * args.m + m) * view.n + n;
        __stcg(to, sum.x);
        if (both) __stcg(to + 1, sum.y);
      } else {
        FinishPair(view, m, n, sum, both);
      }
    }
  }

  MARLIN_DEVICE void StoreGated(int first_m) const {
    const int columns = Warps() * kStripOutputs / 2;
    const int stride = MmaExchangeStride(Warps());
    const int column = Thread() % columns;
    const int n = item.block * columns + column;
    if (n >= args.epilogue.n / 2) return;
#pragma unroll 1
    for (int token = Thread() / columns; token < kMmaExchangeTokens; token += 2) {
      const int m = first_m + token;
      if (m >= args.m) break;
      const float* const row = exchange + token * stride + column;
      FinishGated(args.epilogue, m, n, row[0], row[columns]);
    }
  }
};

}  // namespace marlin::cuda
