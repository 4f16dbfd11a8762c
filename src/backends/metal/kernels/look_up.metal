// marlin_look_up: embedding lookup, out[i, k] = W[k, ids[i]], rounded once to the output type. The
// embedding is stored as GEMM weights.
//
// Each simdgroup writes 128 k of one row; only the 8 lanes that hold the selected column store.
#include "backends/metal/kernels/decode.h"
#include "backends/metal/kernels/rows_elements.h"

using namespace metal;
using namespace marlin::kernels;

[[kernel]] void marlin_look_up(device const uchar* codes [[buffer(MARLIN_BUFFER_CODES)]],
                               device const uchar* scales [[buffer(MARLIN_BUFFER_SCALES)]],
                               device const uchar* extras [[buffer(MARLIN_BUFFER_EXTRAS)]],
                               device const float* table [[buffer(MARLIN_BUFFER_TABLE)]],
                               device const uchar* ids [[buffer(MARLIN_BUFFER_INDICES)]],
                               device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                               device atomic_int* error [[buffer(MARLIN_BUFFER_ROW_ERROR)]],
                               constant LookUpWeightParameters& p
                               [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               ushort simdgroup [[simdgroup_index_in_threadgroup]],
                               ushort simdgroups [[simdgroups_per_threadgroup]],
                               ushort lane [[thread_index_in_simdgroup]]) {
  const int chunk = int(group.x) * simdgroups + simdgroup;
  const long id = IndexAt(ids, p.ids, long(group.y));
  if (!IsIndex(id, p.ids)) {
    if (chunk == 0 && lane == 0) StoreIndexError(ids, p.ids, error);
    return;
  }
  const int column = int(id);
  const int place = column % kStripOutputs - FragmentColumn(lane);
  if (chunk >= p.weights.chunks || place < 0 || place > 1) return;
  const Strip strip =
      StripAt(column / kStripOutputs, {codes, scales, extras, table}, p.weights);
  const ChunkCodes chunk_codes = LoadCodes(strip, chunk, lane);
  const GroupPair chunk_group = LoadChunkGroup(strip, chunk, lane);
  MARLIN_UNROLL
  for (int s = 0; s < kChunkK / kBlockK; ++s) {
    const BlockWeights w = DecodeBlock(strip, chunk_codes, chunk_group, chunk, s, lane);
    MARLIN_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int k = chunk * kChunkK + s * kBlockK + 4 * FragmentRow(lane) + j;
      if (k >= p.weights.k) continue;
      const long at = long(group.y) * p.weights.output_stride + k;
      StoreElement(out, output_type, at, place == 0 ? w.pair[j].x : w.pair[j].y);
    }
  }
}
