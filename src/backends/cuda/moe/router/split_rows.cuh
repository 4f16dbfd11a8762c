// The product of fp32 rows and bf16 weights on matrix units (m16n8k16) without rounding either:
//
//   x = high + middle + low, three bf16 terms of eight significant bits each: the upper halves of x
//   and of what is left. Every product of a term and a weight is exact in fp32; only sums round.
//
// Weights are the A operand (16 experts), rows the B operand (an n8 tile). In a k-tile each term
// has sums of its own, eight MMAs long, which are added as (low + middle) + high; the k-tiles of a
// part are added in order, then the parts, then the bias. All kernels do so, whatever the number
// of rows, so that a row's bits do not depend on it.
//
// Error: with P parts of t k-tiles, abs(logit - exact) <= (8 u_mma + (t + P + 2) u) sum of
// abs(x) abs(w), where u = 2^-24 and u_mma = 2^-23 is the truncation of a tensor core's sum. Terms
// below 2^-133, of an abs(x) below 2^-110, are lost. An Inf has no terms: it makes NaN logits.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/warp_matrix.cuh"
#include "backends/cuda/moe/router/router_product.h"

namespace marlin::cuda {

inline constexpr int kTerms = 3;
inline constexpr int kStepsOfTile = kTileK / 16;
/// Threads of a CTA: each has a quad of eight rows of a k-tile.
inline constexpr int kRouteThreads = kRouterN8 * kTileK / 4;

/// The upper halves of two floats, which are bf16 numbers; the first goes to the low half.
MARLIN_DEVICE uint32_t UpperHalves(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}
MARLIN_DEVICE float WithoutUpperHalf(float value) {
  return value - __uint_as_float(__float_as_uint(value) & 0xffff0000u);
}

/// The quad of the calling thread: token tid / 32 of eight, k 4 (tid % 32) of a k-tile; zeros
/// outside of x.
MARLIN_DEVICE float4 LoadQuad(const RouteRowsArguments& args, int first_token, int tile) {
  const int token = first_token + static_cast<int>(threadIdx.x >> 5);
  const int k = tile * kTileK + static_cast<int>(threadIdx.x & 31) * 4;
  if (token >= args.router.tokens || k >= args.hidden) return {0.0f, 0.0f, 0.0f, 0.0f};
  return *reinterpret_cast<const float4*>(args.x + token * args.x_stride + k);
}

/// Stores the terms of that quad as B fragments: [step of 16 k][term][lane][two registers].
MARLIN_DEVICE void StoreTerms(uint32_t* fragments, float4 v) {
  const int token = static_cast<int>(threadIdx.x >> 5);
  const int quad = static_cast<int>(threadIdx.x & 31);
  const int lane = 4 * token + 2 * (quad & 1);
  uint32_t* to = fragments + (quad >> 2) * kStepWords + 2 * lane + ((quad >> 1) & 1);
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    to[0] = UpperHalves(v.x, v.y);
    to[2] = UpperHalves(v.z, v.w);
    to += 64;
    v = {WithoutUpperHalf(v.x), WithoutUpperHalf(v.y), WithoutUpperHalf(v.z),
         WithoutUpperHalf(v.w)};
  }
}

/// The sums of a k-tile's MMAs: 16 experts x eight tokens for each term.
struct TermSums {
  float of_term[kTerms][4] = {};

  MARLIN_DEVICE void AddStep(const uint32_t (&weights)[4], const uint2 (&rows)[kTerms]) {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      MultiplyAdd<Bf16x2>(of_term[term], weights, rows[term].x, rows[term].y);
    }
  }
  MARLIN_DEVICE void AddTo(float (&sums)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] += __fadd_rn(__fadd_rn(of_term[2][i], of_term[1][i]), of_term[0][i]);
    }
  }
};

/// The lane's B fragments of a step of 16 k.
MARLIN_DEVICE void LoadRows(uint2 (&rows)[kTerms], const uint32_t* fragments, int step, int lane) {
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    rows[term] =
        *reinterpret_cast<const uint2*>(fragments + step * kStepWords + term * 64 + 2 * lane);
  }
}

/// The same from a token's pairs: k 2 (lane % 4) and the next one of the step, and those eight
/// later.
MARLIN_DEVICE void SplitPairs(uint2 (&rows)[kTerms], float2 low, float2 high) {
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    rows[term] = {UpperHalves(low.x, low.y), UpperHalves(high.x, high.y)};
    low = {WithoutUpperHalf(low.x), WithoutUpperHalf(low.y)};
    high = {WithoutUpperHalf(high.x), WithoutUpperHalf(high.y)};
  }
}

/// The lane's A fragment of a step: `sixteen` is 0 or 1, the half of the strip's experts.
MARLIN_DEVICE void LoadWeights(uint32_t (&weights)[4], const uint8_t* tile, int step, int sixteen,
                               int lane) {
  constexpr int kStepsOfBlock = kStepsOfTile / 2;
  const int block = step / kStepsOfBlock * 2 + sixteen;
  const uint4 v = *reinterpret_cast<const uint4*>(tile + block * BlockBytes(16) +
                                                  step % kStepsOfBlock * 512 + lane * 16);
  weights[0] = v.x;
  weights[1] = v.y;
  weights[2] = v.z;
  weights[3] = v.w;
}

}  // namespace marlin::cuda
