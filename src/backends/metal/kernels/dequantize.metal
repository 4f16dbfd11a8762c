// marlin_dequantize: out[k, n] = W[k, n], rounded once to the output type.
//
// Each simdgroup writes one chunk of a strip: 128 k x 8 outputs.
#include "backends/metal/kernels/decode.h"

using namespace metal;
using namespace marlin::kernels;

[[kernel]] void marlin_dequantize(device const uchar* codes [[buffer(MARLIN_BUFFER_CODES)]],
                                  device const uchar* scales [[buffer(MARLIN_BUFFER_SCALES)]],
                                  device const uchar* extras [[buffer(MARLIN_BUFFER_EXTRAS)]],
                                  device const float* table [[buffer(MARLIN_BUFFER_TABLE)]],
                                  device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                  constant Parameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                  uint2 group [[threadgroup_position_in_grid]],
                                  ushort simdgroup [[simdgroup_index_in_threadgroup]],
                                  ushort simdgroups [[simdgroups_per_threadgroup]],
                                  ushort lane [[thread_index_in_simdgroup]]) {
  const int chunk = int(group.x) * simdgroups + simdgroup;
  if (chunk >= p.chunks) return;
  const Strip strip = StripAt(group.y, {codes, scales, extras, table}, p);
  const ChunkCodes chunk_codes = LoadCodes(strip, chunk, lane);
  const GroupPair chunk_group = LoadChunkGroup(strip, chunk, lane);
  const int column = int(group.y) * kStripOutputs + FragmentColumn(lane);
  MARLIN_UNROLL
  for (int s = 0; s < kChunkK / kBlockK; ++s) {
    const BlockWeights w = DecodeBlock(strip, chunk_codes, chunk_group, chunk, s, lane);
    MARLIN_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int k = chunk * kChunkK + s * kBlockK + 4 * FragmentRow(lane) + j;
      if (k >= p.k) continue;
      const long at = long(k) * p.output_stride + long(column) * p.output_column_stride;
      if (column < p.n) StoreElement(out, output_type, at, w.pair[j].x);
      if (column + 1 < p.n) {
        StoreElement(out, output_type, at + p.output_column_stride, w.pair[j].y);
      }
    }
  }
}
