// GemmDirect: GEMM that loads codes and activations from device memory straight into matrix
// fragments in registers; no threadgroup memory, no barriers.
//
//   out[m, n] = epilogue(sum over k of A[m, k] * W[k, n])
//
//   Tiles of rows x outputs, four simdgroups s0 to s3 each:
//   64x64: 32x32 per simdgroup,              32x64, 16x64: all rows x 16 outputs per simdgroup,
//          each weight is decoded twice                    each weight is decoded once
//       +----+----+                              +--+--+--+--+
//       | s0 | s1 |                              |s0|s1|s2|s3|
//       +----+----+                              +--+--+--+--+
//       | s2 | s3 |
//       +----+----+
//
// GLU with a direct epilogue (Paired): the first half of a simdgroup's strips are gate, the other
// half the matching up strips, so a tile has half as many outputs.
//
// Fragment j of a block of 32 k takes k = 4 r + j in its row r (of W) and column r (of A): a lane's
// codes are one word, and its elements of A for all four fragments are 8 consecutive ones.
// Grid of threadgroups: [tiles of n, tiles of m, splits of k]; a split is a number of whole chunks.
// Bytes in flight per simdgroup: 128 * bits of codes per strip.
// Error model: weights rounded to fp32 (3 * 2^-24), fp32 sums; k / splits + splits additions.
// Depends on the element layout of fragments (FragmentRow), which the device's self-test probes.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_GEMM_GEMM_DIRECT_H_
#define MARLIN_BACKENDS_METAL_KERNELS_GEMM_GEMM_DIRECT_H_

#include "backends/metal/kernels/activations.h"
#include "backends/metal/kernels/decode.h"
#include "backends/metal/kernels/epilogue.h"
#include "backends/metal/kernels/fragments.h"

namespace marlin {
namespace kernels {

constant constexpr int kDirectSimdgroups = 4;

/// A lane's elements of four fragments of A: 8 rows x 32 k.
struct InputBlock {
  float4 first;
  float4 second;
};

static inline InputBlock LoadInputBlock(Input input, int row, int k, ushort lane, Parameters p) {
  const int first = k + 4 * FragmentColumn(lane);
  InputBlock block;
  block.first = LoadInput(input, row + FragmentRow(lane), first, p);
  block.second = LoadInput(input, row + FragmentRow(lane), first + 4, p);
  return block;
}

/// The fragments of A of a simdgroup for a block of 32 k.
template <int kRowFragments>
struct InputRows {
  InputBlock block[kRowFragments];
};

/// The accumulators of a simdgroup.
template <int kRowFragments, int kStrips>
struct DirectSums {
  simdgroup_float8x8 fragment[kRowFragments][kStrips];
};

/// Multiply-accumulates a block of A with the weights of strip `j`.
template <int kRowFragments, int kStrips>
static METAL_FUNC void MultiplyStrip(thread DirectSums<kRowFragments, kStrips>& sums,
                                     thread InputRows<kRowFragments>& a, BlockWeights w, int j) {
  MARLIN_UNROLL
  for (int f = 0; f < 4; ++f) {
    const simdgroup_float8x8 b = FragmentOf(w.pair[f]);
    MARLIN_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      const float2 elements = float2(a.block[i].first[f], a.block[i].second[f]);
      metal::simdgroup_multiply_accumulate(sums.fragment[i][j], FragmentOf(elements), b,
                                           sums.fragment[i][j]);
    }
  }
}

/// The strips of a simdgroup.
template <int kStrips>
struct DirectStrips {
  Strip strip[kStrips];
};

template <int kRowFragments, int kStrips>
static METAL_FUNC void ClearSums(thread DirectSums<kRowFragments, kStrips>& sums) {
  MARLIN_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    MARLIN_UNROLL
    for (int j = 0; j < kStrips; ++j) {
      sums.fragment[i][j] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
}

/// Main loop: multiply-accumulates rows of A from `row` on with chunks [chunk, end) of the strips.
template <int kRowFragments, int kStrips>
static METAL_FUNC void AddChunks(thread DirectSums<kRowFragments, kStrips>& sums,
                                 thread DirectStrips<kStrips>& strips, Input input, int row,
                                 int chunk, int end, ushort lane, Parameters p) {
  for (; chunk < end; ++chunk) {
    ChunkCodes chunk_codes[kStrips];
    GroupPair chunk_group[kStrips];
    MARLIN_UNROLL
    for (int j = 0; j < kStrips; ++j) {
      chunk_codes[j] = LoadCodes(strips.strip[j], chunk, lane);
      chunk_group[j] = LoadChunkGroup(strips.strip[j], chunk, lane);
    }
    MARLIN_UNROLL
    for (int s = 0; s < kChunkK / kBlockK; ++s) {
      InputRows<kRowFragments> a;
      MARLIN_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        a.block[i] = LoadInputBlock(input, row + i * kSide, chunk * kChunkK + s * kBlockK, lane, p);
      }
      MARLIN_UNROLL
      for (int j = 0; j < kStrips; ++j) {
        const BlockWeights w =
            DecodeBlock(strips.strip[j], chunk_codes[j], chunk_group[j], chunk, s, lane);
        MultiplyStrip<kRowFragments, kStrips>(sums, a, w, j);
      }
    }
  }
}

template <int kRowFragments, int kStrips, int kSimdgroupColumns>
static METAL_FUNC void GemmDirect(PackedWeights weights, Input input, Output output, uint3 group,
                                  ushort simdgroup, ushort lane, Parameters p) {
  constexpr int kSimdgroupRows = kDirectSimdgroups / kSimdgroupColumns;
  const int row =
      (int(group.y) * kSimdgroupRows + simdgroup / kSimdgroupColumns) * (kRowFragments * kSide);
  const int half_strips = p.n / 2 / kStripOutputs;
  const int run = Paired() ? kStrips / 2 : kStrips;  // Adjacent strips: gate strips if paired.
  const int strip = (int(group.x) * kSimdgroupColumns + simdgroup % kSimdgroupColumns) * run;
  const int last_strip = Paired() ? half_strips - 1 : (p.n - 1) / kStripOutputs;
  if (row >= p.m || strip > last_strip) return;

  DirectStrips<kStrips> strips;
  MARLIN_UNROLL
  for (int j = 0; j < kStrips; ++j) {
    // Strips beyond the last one repeat it; their accumulators are not stored.
    const int of_run = metal::min(strip + j % run, last_strip);
    strips.strip[j] = StripAt(of_run + j / run * half_strips, weights, p);
  }
  DirectSums<kRowFragments, kStrips> sums;
  ClearSums<kRowFragments, kStrips>(sums);
  const int first_chunk = int(group.z) * p.steps_of_split;
  const int end_chunk = metal::min(first_chunk + p.steps_of_split, p.chunks);
  AddChunks<kRowFragments, kStrips>(sums, strips, input, row, first_chunk, end_chunk, lane, p);

  MARLIN_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    const int m = row + i * kSide + FragmentRow(lane);
    MARLIN_UNROLL
    for (int j = 0; j < kStrips; ++j) {
      const int column = (strip + j) * kStripOutputs + FragmentColumn(lane);
      const float2 sum = ElementsOf(sums.fragment[i][j]);
      if (!Paired()) {
        StoreSum(output, int(group.z), m, column, sum.x, p);
        StoreSum(output, int(group.z), m, column + 1, sum.y, p);
      } else if (j < kStrips / 2) {
        const float2 up = ElementsOf(sums.fragment[i][j + kStrips / 2]);
        StoreGated(output, m, column, sum.x, up.x, p);
        StoreGated(output, m, column + 1, sum.y, up.y, p);
      }
    }
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_GEMM_GEMM_DIRECT_H_
