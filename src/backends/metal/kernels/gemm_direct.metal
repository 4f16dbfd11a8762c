// marlin_gemm_direct_RxC: codes and activations go from device memory straight into the registers of
// matrix fragments; no threadgroup memory, no barrier.
//
//   out[m, n] = epilogue(sum over k of A[m, k] * W[k, n])
//
//   64x64: four simdgroups of 32 rows x 32 outputs       32x64, 16x64: four of all rows x 16 outputs
//       +----+----+                                          +--+--+--+--+
//       | s0 | s1 |   each weight decoded twice              |s0|s1|s2|s3|  each weight decoded once
//       +----+----+                                          +--+--+--+--+
//       | s2 | s3 |
//       +----+----+
//
// Fragment j of a block of 32 k takes k = 4 r + j in its row r (of W) and column r (of A): a lane's
// codes are one word, and its elements of A for all four fragments are 8 neighbours.
// threadgroups: [tiles of outputs, tiles of rows, splits of k]; a split counts whole chunks.
// Bytes in flight of a simdgroup: 128 * bits of codes a strip.
// Error model: weights rounded as fp32 (3 * 2^-24), fp32 sums; k / splits + splits additions.
// Relies on the places of elements in fragments (FragmentRow): the device's self-test probes them.
#include <metal_simdgroup_matrix>

#include "backends/metal/kernels/activations.h"
#include "backends/metal/kernels/decode.h"
#include "backends/metal/kernels/epilogue.h"

using namespace metal;
using namespace marlin::kernels;

constant constexpr int kSimdgroups = 4;
constant constexpr int kSide = 8;  // Of a fragment.

/// A lane's elements of four fragments of A: 8 rows x 32 k.
struct InputBlock {
  float4 first;
  float4 second;
};

static inline InputBlock LoadInputBlock(device const uchar* input, int row, int k, ushort lane,
                                        constant Parameters& p) {
  const int first = k + 4 * FragmentColumn(lane);
  InputBlock block;
  block.first = LoadInput(input, row + FragmentRow(lane), first, p);
  block.second = LoadInput(input, row + FragmentRow(lane), first + 4, p);
  return block;
}

static inline simdgroup_float8x8 FragmentOf(float2 elements) {
  simdgroup_float8x8 fragment;
  fragment.thread_elements() = elements;
  return fragment;
}

template <int kRowFragments, int kStrips, int kSimdgroupColumns>
[[kernel]] void marlin_gemm_direct(device const uchar* codes [[buffer(MARLIN_BUFFER_CODES)]],
                                   device const uchar* scales [[buffer(MARLIN_BUFFER_SCALES)]],
                                   device const uchar* extras [[buffer(MARLIN_BUFFER_EXTRAS)]],
                                   device const float* table [[buffer(MARLIN_BUFFER_TABLE)]],
                                   device const uchar* input [[buffer(MARLIN_BUFFER_INPUT)]],
                                   device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                   device const uchar* bias [[buffer(MARLIN_BUFFER_BIAS)]],
                                   device const float* row_weight
                                   [[buffer(MARLIN_BUFFER_ROW_WEIGHT)]],
                                   constant Parameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                   uint3 group [[threadgroup_position_in_grid]],
                                   ushort simdgroup [[simdgroup_index_in_threadgroup]],
                                   ushort lane [[thread_index_in_simdgroup]]) {
  constexpr int kSimdgroupRows = kSimdgroups / kSimdgroupColumns;
  const int row = (int(group.y) * kSimdgroupRows + simdgroup / kSimdgroupColumns) *
                  (kRowFragments * kSide);
  const int strip = (int(group.x) * kSimdgroupColumns + simdgroup % kSimdgroupColumns) * kStrips;
  const int last_strip = (p.n - 1) / kStripOutputs;
  if (row >= p.m || strip > last_strip) return;

  simdgroup_float8x8 sums[kRowFragments][kStrips];
  for (int i = 0; i < kRowFragments; ++i) {
    for (int j = 0; j < kStrips; ++j) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  const int first_chunk = int(group.z) * p.steps_of_split;
  const int end_chunk = min(first_chunk + p.steps_of_split, p.chunks);
  for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
    Strip strips[kStrips];
    ChunkCodes chunk_codes[kStrips];
    GroupPair chunk_group[kStrips];
    for (int j = 0; j < kStrips; ++j) {
      // Strips behind the last one repeat it, and nobody stores their sums.
      strips[j] = StripAt(min(strip + j, last_strip), codes, scales, extras, table, p);
      chunk_codes[j] = LoadCodes(strips[j], chunk, lane);
      chunk_group[j] = LoadChunkGroup(strips[j], chunk, lane);
    }
    for (int s = 0; s < kChunkK / kBlockK; ++s) {
      InputBlock a[kRowFragments];
      for (int i = 0; i < kRowFragments; ++i) {
        a[i] = LoadInputBlock(input, row + i * kSide, chunk * kChunkK + s * kBlockK, lane, p);
      }
      for (int j = 0; j < kStrips; ++j) {
        const BlockWeights w =
            DecodeBlock(strips[j], chunk_codes[j], chunk_group[j], chunk, s, lane);
        for (int f = 0; f < 4; ++f) {
          const simdgroup_float8x8 weights = FragmentOf(w.pair[f]);
          for (int i = 0; i < kRowFragments; ++i) {
            simdgroup_multiply_accumulate(sums[i][j],
                                          FragmentOf(float2(a[i].first[f], a[i].second[f])),
                                          weights, sums[i][j]);
          }
        }
      }
    }
  }

  const Output output = {out, bias, row_weight};
  for (int i = 0; i < kRowFragments; ++i) {
    const int m = row + i * kSide + FragmentRow(lane);
    for (int j = 0; j < kStrips; ++j) {
      const int column = (strip + j) * kStripOutputs + FragmentColumn(lane);
      const float2 sum = sums[i][j].thread_elements();
      StoreSum(output, int(group.z), m, column, sum.x, p);
      StoreSum(output, int(group.z), m, column + 1, sum.y, p);
    }
  }
}

#define MARLIN_GEMM_DIRECT(name, ...)                                                     \
  template [[host_name(name)]] [[kernel]] decltype(marlin_gemm_direct<__VA_ARGS__>)       \
  marlin_gemm_direct<__VA_ARGS__>;

MARLIN_GEMM_DIRECT("marlin_gemm_direct_16x64", 2, 2, 4)
MARLIN_GEMM_DIRECT("marlin_gemm_direct_32x64", 4, 2, 4)
MARLIN_GEMM_DIRECT("marlin_gemm_direct_64x64", 4, 4, 2)
