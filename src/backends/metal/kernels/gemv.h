// Gemv: small-batch GEMV of kRows rows of A; each weight is decoded once for all of them.
//
//   out[m, n] = epilogue(sum over k of A[m, k] * W[k, n])
//
//   threadgroup = strip of 8 outputs        chunk 0    1    2    3    4 ...   (128 k each)
//                                           sg 0 [====]              [====]
//                                           sg 1      [====]               [====]
//                                           sg 2           [====]   ...
//   lane = 2 outputs x every 8th run of 4 k; sums are reduced over lanes, then over simdgroups
//   GLU: half of the simdgroups take a gate strip, the other half the matching up strip
//
// Batch-invariant: the order of a row's additions depends only on k and the number of simdgroups,
// so the result of a row is bit-identical for every kRows, m and content of the other rows.
// Threadgroup memory: 256 kRows bytes. Bytes in flight per simdgroup: 128 * bits of codes.
// Error model: weights rounded to fp32 (3 * 2^-24), fp32 fma; a chain of
// ceil(k / 8 / simdgroups) + 3 + simdgroups additions.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_GEMV_H_
#define MARLIN_BACKENDS_METAL_KERNELS_GEMV_H_

#include "backends/metal/kernels/activations.h"
#include "backends/metal/kernels/decode.h"
#include "backends/metal/kernels/epilogue.h"

namespace marlin {
namespace kernels {

constant constexpr int kMostSimdgroups = 8;

/// A thread's position in its threadgroup.
struct SimdgroupPlace {
  ushort simdgroup;
  ushort simdgroups;
  ushort lane;
};

/// Floats of threadgroup memory: [simdgroups][kRows][8].
template <int kRows>
struct GemvSums {
  static constexpr constant int kCount = kMostSimdgroups * kRows * kStripOutputs;
};

/// Reduces an output over `count` simdgroups, the first of which wrote *sums.
template <int kRows>
static inline float SumOverSimdgroups(threadgroup const float* sums, int count) {
  float total = sums[0];
  for (int i = 1; i < count; ++i) total += sums[i * kRows * kStripOutputs];
  return total;
}

/// Butterfly all-reduce over the lanes that share a pair of outputs.
static inline float2 SumOverRows(float2 sum) {
  sum += metal::simd_shuffle_xor(sum, ushort(2));
  sum += metal::simd_shuffle_xor(sum, ushort(4));
  sum += metal::simd_shuffle_xor(sum, ushort(16));
  return sum;
}

/// Main loop: sums of kRows rows from `first_row` on over every simdgroups-th chunk of a strip from
/// `first_chunk` on; reduces them over lanes into *sums, [simdgroups][kRows][8], and waits until
/// every simdgroup has done so.
template <int kRows>
static METAL_FUNC void SumStrip(Strip strip, Input input, threadgroup float* sums, int first_row,
                                int first_chunk, int simdgroups, SimdgroupPlace place,
                                Parameters p) {
  float2 sum[kRows];
  MARLIN_UNROLL
  for (int r = 0; r < kRows; ++r) sum[r] = float2(0.0f);
  for (int chunk = first_chunk; chunk < p.chunks; chunk += simdgroups) {
    const ChunkCodes chunk_codes = LoadCodes(strip, chunk, place.lane);
    const GroupPair chunk_group = LoadChunkGroup(strip, chunk, place.lane);
    MARLIN_UNROLL
    for (int s = 0; s < kChunkK / kBlockK; ++s) {
      const BlockWeights w = DecodeBlock(strip, chunk_codes, chunk_group, chunk, s, place.lane);
      const int k = chunk * kChunkK + s * kBlockK + 4 * FragmentRow(place.lane);
      MARLIN_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float4 a = LoadInput(input, first_row + r, k, p);
        MARLIN_UNROLL
        for (int j = 0; j < 4; ++j) sum[r] = metal::fma(w.pair[j], float2(a[j]), sum[r]);
      }
    }
  }

  MARLIN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float2 total = SumOverRows(sum[r]);
    if ((place.lane & kRowBits) == 0) {
      threadgroup float* to =
          sums + (place.simdgroup * kRows + r) * kStripOutputs + FragmentColumn(place.lane);
      to[0] = total.x;
      to[1] = total.y;
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

template <int kRows>
static METAL_FUNC void Gemv(PackedWeights weights, Input input, Output output,
                            threadgroup float* sums, uint2 group, SimdgroupPlace place,
                            Parameters p) {
  const int simdgroups = Paired() ? place.simdgroups / 2 : place.simdgroups;  // Per strip.
  const bool is_gate = place.simdgroup < simdgroups;  // Always true without pairing.
  const long strip_index = is_gate ? group.x : group.x + uint(p.n / 2 / kStripOutputs);
  const int first_row = int(group.y) * kRows;
  const int first_chunk = is_gate ? place.simdgroup : place.simdgroup - simdgroups;
  SumStrip<kRows>(StripAt(strip_index, weights, p), input, sums, first_row, first_chunk, simdgroups,
                  place, p);
  constexpr int kStride = kRows * kStripOutputs;
  for (int i = place.simdgroup * kLanes + place.lane; i < kStride; i += place.simdgroups * kLanes) {
    const int row = first_row + i / kStripOutputs;
    const int column = int(group.x) * kStripOutputs + i % kStripOutputs;
    const float total = SumOverSimdgroups<kRows>(sums + i, simdgroups);
    if (Paired()) {
      const float up = SumOverSimdgroups<kRows>(sums + i + simdgroups * kStride, simdgroups);
      StoreGated(output, row, column, total, up, p);
    } else {
      StoreSum(output, 0, row, column, total, p);
    }
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_GEMV_H_
