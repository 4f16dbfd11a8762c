// Gemv: small-batch GEMV of kRows rows of A; each weight is decoded once for all of them.
//
//   out[m, n] = epilogue(sum over k of A[m, k] * W[k, n])
//
//   threadgroup = kStrips strips of         chunk 0    1    2    3    4 ...   (128 k each)
//   8 outputs                               sg 0 [====]              [====]
//                                           sg 1      [====]               [====]
//                                           sg 2           [====]   ...
//   lane = 2 outputs x every 8th run of 4 k; sums are reduced over lanes, then over simdgroups
//   Two strips: a simdgroup takes the same chunk of both, and loads A once.
//   GLU: the two strips are a gate strip and the matching up strip; with one strip per simdgroup,
//   half of the simdgroups take the gate strip, the other half the up strip.
//
// Values are summed unscaled within a group, and the sum is scaled, except with biases.
// Batch-invariant: the order of a row's additions depends only on k and the number of simdgroups
// per strip, so the result of a row is bit-identical for every kRows, kStrips, m and content of the
// other rows.
// Threadgroup memory: 256 kRows kStrips bytes, at least 2 KiB, which hold the table of a format
// first. Bytes in flight per simdgroup: 128 * bits of codes per strip.
// Error model: one rounding of a group's sum by its scale or, with biases, of weights to fp32
// (3 * 2^-24 with zero points), fp32 fma; a chain of ceil(k / 8 / simdgroups) + 3 + simdgroups
// additions.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_GEMM_GEMV_H_
#define MARLIN_BACKENDS_METAL_KERNELS_GEMM_GEMV_H_

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

/// Entries of a table of pairs of codes of up to 4 bits.
constant constexpr int kPairsOfTable = 256;

/// Floats of threadgroup memory: [simdgroups][kStrips][kRows][8], or a table.
template <int kRows, int kStrips>
struct GemvSums {
  static constexpr constant int kOfSimdgroup = kStrips * kRows * kStripOutputs;
  static constexpr constant int kCount = kMostSimdgroups * kOfSimdgroup > 2 * kPairsOfTable
                                             ? kMostSimdgroups* kOfSimdgroup
                                             : 2 * kPairsOfTable;
};

/// Reduces an output over `count` simdgroups, the first of which wrote *sums.
template <int kRows, int kStrips>
static inline float SumOverSimdgroups(threadgroup const float* sums, int count) {
  float total = sums[0];
  for (int i = 1; i < count; ++i) total += sums[i * GemvSums<kRows, kStrips>::kOfSimdgroup];
  return total;
}

/// Butterfly all-reduce over the lanes that share a pair of outputs.
static inline float2 SumOverRows(float2 sum) {
  sum += metal::simd_shuffle_xor(sum, ushort(2));
  sum += metal::simd_shuffle_xor(sum, ushort(4));
  sum += metal::simd_shuffle_xor(sum, ushort(16));
  return sum;
}

/// Whether the values of a format's codes are in threadgroup memory.
static inline bool KeepsTable() { return code_kind == kCodesTable; }

/// Fills the table: by pairs of codes of up to 4 bits, otherwise by codes. Ends with a barrier.
static METAL_FUNC void LoadTable(threadgroup float* to, device const float* table,
                                 SimdgroupPlace place) {
  const int bits = CodeBits(code_bits);
  const int pairs = bits <= 4 ? 1 << (2 * bits) : 0;
  const int first = place.simdgroup * kLanes + place.lane;
  const int threads = place.simdgroups * kLanes;
  for (int i = first; i < pairs; i += threads) {
    to[2 * i] = table[i & ((1 << bits) - 1)];
    to[2 * i + 1] = table[i >> bits];
  }
  for (int i = first; bits > 4 && i < 1 << bits; i += threads) to[i] = table[i];
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

static inline float2 PairOfTable(threadgroup const float* table, ChunkCodes codes, int s, int j) {
  if (code_bits == 4) {
    return ((threadgroup const float2*)table)[(codes.low[s] >> (8 * j)) & 0xffu];
  }
  const uint pair = PairOfCodes(codes, s, j);
  const int bits = CodeBits(code_bits);
  if (bits > 4) return float2(table[pair & 0xffffu], table[pair >> 16]);
  const uint both = (pair | pair >> (16 - bits)) & ((1u << (2 * bits)) - 1);
  return ((threadgroup const float2*)table)[both];
}

/// Whether sums of a group are scaled, instead of its weights.
static inline bool ScalesSums() { return group_span != kSpanNone && group_extra != kExtraBiases; }
/// Whether scales contain RawFactor. Zero points are subtracted from values.
static inline bool FoldsFactor() { return group_span != kSpanNone && group_extra != kExtraZeros; }

/// Blocks of a chunk with one scale per output, as far as it is known.
static inline int BlocksOfGroup() {
  if (group_span != kSpanBlock) return kChunkK / kBlockK;
  return group_log2 == 6 ? 2 : 1;
}

/// The factors of A: values without their group's scale, or weights with biases.
static inline BlockWeights Factors(BlockWeights raw, Strip strip, GroupPair group) {
  BlockWeights factors = raw;
  MARLIN_UNROLL
  for (int j = 0; j < 4; ++j) {
    if (code_kind == kCodesInteger && integer_zeros) {
      // Exact: both are integers.
      factors.pair[j] -= IntegerBias(strip, j) + group.extra;
    } else {
      if (code_kind == kCodesInteger) factors.pair[j] -= IntegerBias(strip, j);
      if (!FoldsFactor()) factors.pair[j] *= RawFactor();
      if (group_extra == kExtraZeros) factors.pair[j] -= group.extra;
    }
    if (group_extra == kExtraBiases) {
      factors.pair[j] = metal::fma(factors.pair[j], group.scale, group.extra);
    }
  }
  return factors;
}

/// The strips of a simdgroup.
template <int kStrips>
struct GemvStrips {
  Strip strip[kStrips];
};

/// Sums of a lane.
template <int kRows, int kStrips>
struct GemvTotals {
  float2 sum[kStrips][kRows];
};

/// The chunks that a lane adds: `first`, `first + step`, ..., of rows from `first_row` on.
struct LaneChunks {
  int first_row;
  int first;
  int step;
  ushort lane;
};

/// A lane's codes of a chunk, and the group that it is in with its sums.
template <int kRows, int kStrips>
struct GemvChunk {
  ChunkCodes codes[kStrips];
  GroupPair group[kStrips];
  float2 part[kStrips][kRows];
};

/// Factors of a block, per strip.
template <int kStrips>
struct GemvFactors {
  BlockWeights of_strip[kStrips];
};

/// The factors of block `s`. Begins with its group if it is the first block of one.
template <int kRows, int kStrips>
static METAL_FUNC GemvFactors<kStrips> FactorsOfBlock(thread GemvChunk<kRows, kStrips>& at,
                                                      thread GemvStrips<kStrips>& strips,
                                                      threadgroup const float* table, int chunk,
                                                      int s, ushort lane) {
  GemvFactors<kStrips> factors;
  MARLIN_UNROLL
  for (int i = 0; i < kStrips; ++i) {
    const Strip strip = strips.strip[i];
    if (group_span != kSpanNone && s % BlocksOfGroup() == 0) {
      at.group[i] = LoadGroup(strip, chunk, s, lane, FoldsFactor() ? RawFactor() : 1.0f);
      MARLIN_UNROLL
      for (int r = 0; r < kRows; ++r) at.part[i][r] = float2(0.0f);
    }
    BlockWeights raw;
    if (KeepsTable()) {
      MARLIN_UNROLL
      for (int j = 0; j < 4; ++j) raw.pair[j] = PairOfTable(table, at.codes[i], s, j);
    } else {
      raw = RawBlock(strip, at.codes[i], s, lane);
    }
    factors.of_strip[i] = Factors(raw, strip, at.group[i]);
  }
  return factors;
}

/// Adds the products of block `s` with four elements of row `r`.
template <int kRows, int kStrips>
static METAL_FUNC void AddProducts(thread GemvTotals<kRows, kStrips>& totals,
                                   thread GemvChunk<kRows, kStrips>& at,
                                   thread GemvFactors<kStrips>& factors, float4 a, int r, int s) {
  MARLIN_UNROLL
  for (int i = 0; i < kStrips; ++i) {
    float2 sum = ScalesSums() ? at.part[i][r] : totals.sum[i][r];
    MARLIN_UNROLL
    for (int j = 0; j < 4; ++j) {
      sum = metal::fma(factors.of_strip[i].pair[j], float2(a[j]), sum);
    }
    if (!ScalesSums()) {
      totals.sum[i][r] = sum;
    } else if ((s + 1) % BlocksOfGroup() == 0) {
      totals.sum[i][r] = metal::fma(at.group[i].scale, sum, totals.sum[i][r]);
    } else {
      at.part[i][r] = sum;
    }
  }
}

/// Adds the chunks of a lane.
template <int kRows, int kStrips>
static METAL_FUNC void AddChunksOfLane(thread GemvTotals<kRows, kStrips>& totals,
                                       thread GemvStrips<kStrips>& strips, Input input,
                                       threadgroup const float* table, LaneChunks own,
                                       Parameters p) {
  device const uchar* rows[kRows];
  // Rows beyond m repeat the last one; their sums are not stored.
  MARLIN_UNROLL
  for (int r = 0; r < kRows; ++r) rows[r] = RowOf(input, metal::min(own.first_row + r, p.m - 1), p);
  device const uchar* chunk_codes[kStrips];
  MARLIN_UNROLL
  for (int i = 0; i < kStrips; ++i) {
    chunk_codes[i] = strips.strip[i].codes + long(own.first) * ChunkBytes();
  }
  const long codes_step = long(own.step) * ChunkBytes();
  int quad = own.first * (kChunkK / 4) + FragmentRow(own.lane);
  for (int chunk = own.first; chunk < p.chunks; chunk += own.step) {
    GemvChunk<kRows, kStrips> at;
    MARLIN_UNROLL
    for (int i = 0; i < kStrips; ++i) {
      at.codes[i] = LoadCodesAt(chunk_codes[i], strips.strip[i], own.lane);
      chunk_codes[i] += codes_step;
    }
    MARLIN_UNROLL
    for (int s = 0; s < kChunkK / kBlockK; ++s) {
      GemvFactors<kStrips> factors =
          FactorsOfBlock<kRows, kStrips>(at, strips, table, chunk, s, own.lane);
      MARLIN_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float4 a = LoadOfRow(rows[r], quad + s * (kBlockK / 4), p);
        AddProducts<kRows, kStrips>(totals, at, factors, a, r, s);
      }
    }
    quad += own.step * (kChunkK / 4);
  }
}

/// Main loop: the sums of kRows rows over the chunks of every lane; reduces them over lanes into
/// *sums, [simdgroups][kStrips][kRows][8], and waits until every simdgroup has done so. The strips
/// of a threadgroup share a table.
template <int kRows, int kStrips>
static METAL_FUNC void SumStrips(thread GemvStrips<kStrips>& strips, Input input,
                                 threadgroup float* sums, LaneChunks own, SimdgroupPlace place,
                                 Parameters p) {
  if (KeepsTable()) LoadTable(sums, strips.strip[0].table, place);
  GemvTotals<kRows, kStrips> totals;
  MARLIN_UNROLL
  for (int i = 0; i < kStrips; ++i) {
    MARLIN_UNROLL
    for (int r = 0; r < kRows; ++r) totals.sum[i][r] = float2(0.0f);
  }
  AddChunksOfLane<kRows, kStrips>(totals, strips, input, sums, own, p);
  if (KeepsTable()) metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  MARLIN_UNROLL
  for (int i = 0; i < kStrips; ++i) {
    MARLIN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float2 total = SumOverRows(totals.sum[i][r]);
      if ((place.lane & kRowBits) == 0) {
        threadgroup float* to = sums +
                                ((place.simdgroup * kStrips + i) * kRows + r) * kStripOutputs +
                                FragmentColumn(place.lane);
        to[0] = total.x;
        to[1] = total.y;
      }
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

/// The strips of threadgroup `group`.
template <int kStrips>
static METAL_FUNC GemvStrips<kStrips> StripsOfGroup(PackedWeights weights, uint group, bool is_gate,
                                                    Parameters p) {
  const int half_strips = p.n / 2 / kStripOutputs;
  const int last_strip = (p.n - 1) / kStripOutputs;
  GemvStrips<kStrips> strips;
  MARLIN_UNROLL
  for (int i = 0; i < kStrips; ++i) {
    int strip = int(group) * kStrips + i;
    if (Paired()) strip = int(group) + (i > 0 || !is_gate ? half_strips : 0);
    // Strips beyond the last one repeat it; their sums are not stored.
    strips.strip[i] = StripAt(kStrips > 1 ? metal::min(strip, last_strip) : strip, weights, p);
  }
  return strips;
}

template <int kRows, int kStrips>
static METAL_FUNC void Gemv(PackedWeights weights, Input input, Output output,
                            threadgroup float* sums, uint2 group, SimdgroupPlace place,
                            Parameters p) {
  // Gate and up by different simdgroups.
  const bool apart = Paired() && kStrips == 1;
  const int simdgroups = apart ? place.simdgroups / 2 : place.simdgroups;  // Per strip.
  const bool is_gate = place.simdgroup < simdgroups;  // Always true unless apart.
  const int first_row = int(group.y) * kRows;
  const int first_chunk = is_gate ? place.simdgroup : place.simdgroup - simdgroups;
  const LaneChunks own = {first_row, first_chunk, simdgroups, place.lane};
  GemvStrips<kStrips> strips = StripsOfGroup<kStrips>(weights, group.x, is_gate, p);
  SumStrips<kRows, kStrips>(strips, input, sums, own, place, p);
  constexpr int kOfStrip = kRows * kStripOutputs;
  constexpr int kOfSimdgroup = GemvSums<kRows, kStrips>::kOfSimdgroup;
  const int outputs = Paired() ? kOfStrip : kOfSimdgroup;
  for (int i = place.simdgroup * kLanes + place.lane; i < outputs; i += place.simdgroups * kLanes) {
    const int row = first_row + i % kOfStrip / kStripOutputs;
    const int strip = Paired() ? int(group.x) : int(group.x) * kStrips + i / kOfStrip;
    const int column = strip * kStripOutputs + i % kStripOutputs;
    const float total = SumOverSimdgroups<kRows, kStrips>(sums + i, simdgroups);
    if (Paired()) {
      const int to_up = apart ? simdgroups * kOfSimdgroup : kOfStrip;
      const float up = SumOverSimdgroups<kRows, kStrips>(sums + i + to_up, simdgroups);
      StoreGated(output, row, column, total, up, p);
    } else {
      StoreSum(output, 0, row, column, total, p);
    }
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_GEMM_GEMV_H_
