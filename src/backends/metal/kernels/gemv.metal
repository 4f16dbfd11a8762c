// marlin_gemv_N: N rows of A at a time, each weight decoded once for all of them.
//
//   out[m, n] = epilogue(sum over k of A[m, k] * W[k, n])
//
//   threadgroup = strip of 8 outputs        chunk 0    1    2    3    4 ...   (128 k each)
//                                           sg 0 [====]              [====]
//                                           sg 1      [====]               [====]
//                                           sg 2           [====]   ...
//   lane = 2 outputs x every 8th run of 4 k; its sums are added over lanes, then over simdgroups
//
// The order of a row's additions depends on k and on the number of simdgroups alone, so a row has
// the same bits whatever N, m and the other rows are.
// Threadgroup memory: 256 N bytes. Bytes in flight of a simdgroup: 128 * bits of codes.
// Error model: weights rounded as fp32 (3 * 2^-24), fp32 fma; ceil(k / 8 / simdgroups) + 3 +
// simdgroups additions in a chain.
#include "backends/metal/kernels/activations.h"
#include "backends/metal/kernels/decode.h"
#include "backends/metal/kernels/epilogue.h"

using namespace metal;
using namespace marlin::kernels;

constant constexpr int kMostSimdgroups = 8;

/// The sum over all lanes with the same outputs; in every one of them.
static inline float2 SumOverRows(float2 sum) {
  sum += simd_shuffle_xor(sum, ushort(2));
  sum += simd_shuffle_xor(sum, ushort(4));
  sum += simd_shuffle_xor(sum, ushort(16));
  return sum;
}

template <int kRows>
[[kernel]] void marlin_gemv(device const uchar* codes [[buffer(MARLIN_BUFFER_CODES)]],
                            device const uchar* scales [[buffer(MARLIN_BUFFER_SCALES)]],
                            device const uchar* extras [[buffer(MARLIN_BUFFER_EXTRAS)]],
                            device const float* table [[buffer(MARLIN_BUFFER_TABLE)]],
                            device const uchar* input [[buffer(MARLIN_BUFFER_INPUT)]],
                            device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                            device const uchar* bias [[buffer(MARLIN_BUFFER_BIAS)]],
                            device const float* row_weight [[buffer(MARLIN_BUFFER_ROW_WEIGHT)]],
                            constant Parameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                            uint2 group [[threadgroup_position_in_grid]],
                            ushort thread_index [[thread_index_in_threadgroup]],
                            ushort simdgroup [[simdgroup_index_in_threadgroup]],
                            ushort simdgroups [[simdgroups_per_threadgroup]],
                            ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float sums[kMostSimdgroups][kRows][kStripOutputs];
  const Strip strip = StripAt(group.x, codes, scales, extras, table, p);
  const int first_row = int(group.y) * kRows;

  float2 sum[kRows];
  for (int r = 0; r < kRows; ++r) sum[r] = float2(0.0f);
  for (int chunk = simdgroup; chunk < p.chunks; chunk += simdgroups) {
    const ChunkCodes chunk_codes = LoadCodes(strip, chunk, lane);
    const GroupPair chunk_group = LoadChunkGroup(strip, chunk, lane);
    for (int s = 0; s < kChunkK / kBlockK; ++s) {
      const BlockWeights w = DecodeBlock(strip, chunk_codes, chunk_group, chunk, s, lane);
      const int k = chunk * kChunkK + s * kBlockK + 4 * FragmentRow(lane);
      for (int r = 0; r < kRows; ++r) {
        const float4 a = LoadInput(input, first_row + r, k, p);
        for (int j = 0; j < 4; ++j) sum[r] = fma(w.pair[j], float2(a[j]), sum[r]);
      }
    }
  }

  for (int r = 0; r < kRows; ++r) {
    const float2 total = SumOverRows(sum[r]);
    if ((lane & kRowBits) == 0) {
      sums[simdgroup][r][FragmentColumn(lane)] = total.x;
      sums[simdgroup][r][FragmentColumn(lane) + 1] = total.y;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const Output output = {out, bias, row_weight};
  for (int i = thread_index; i < kRows * kStripOutputs; i += simdgroups * kLanes) {
    const int r = i / kStripOutputs;
    const int column = i % kStripOutputs;
    float total = sums[0][r][column];
    for (int other = 1; other < simdgroups; ++other) total += sums[other][r][column];
    StoreSum(output, 0, first_row + r, int(group.x) * kStripOutputs + column, total, p);
  }
}

#define MARLIN_GEMV(rows)                                            \
  template [[host_name("marlin_gemv_" #rows)]] [[kernel]] decltype(marlin_gemv<rows>) \
  marlin_gemv<rows>;

MARLIN_GEMV(1)
MARLIN_GEMV(2)
MARLIN_GEMV(4)
MARLIN_GEMV(8)
MARLIN_GEMV(16)
