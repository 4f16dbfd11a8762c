// marlin_look_up: embedding lookup, out[i, k] = W[k, ids[i]], rounded once to the output type. The
// embedding is stored as GEMM weights.
//
// Each simdgroup writes 128 k of one row; only the 8 lanes that hold the selected column store.
// marlin_look_up reports ids that are out of range; marlin_look_up_i32, which other frameworks run,
// fills their rows with NaN.
#include "backends/metal/kernels/decode.h"
#include "backends/metal/kernels/rows/rows_elements.h"

using namespace metal;
using namespace marlin::kernels;

/// Where a simdgroup writes.
struct LookUpPlace {
  int row;
  int chunk;
  ushort lane;
};

/// Without a column, writes NaN.
static METAL_FUNC void LookUpChunk(PackedWeights packed, int column, bool has_column,
                                   LookUpPlace at, device uchar* out, Parameters p) {
  const int place = column % kStripOutputs - FragmentColumn(at.lane);
  if (at.chunk >= p.chunks || place < 0 || place > 1) return;
  const Strip strip = StripAt(column / kStripOutputs, packed, p);
  const ChunkCodes codes = LoadCodes(strip, at.chunk, at.lane);
  const GroupPair group = LoadChunkGroup(strip, at.chunk, at.lane);
  MARLIN_UNROLL
  for (int s = 0; s < kChunkK / kBlockK; ++s) {
    const BlockWeights w = DecodeBlock(strip, codes, group, at.chunk, s, at.lane);
    MARLIN_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int k = at.chunk * kChunkK + s * kBlockK + 4 * FragmentRow(at.lane) + j;
      if (k >= p.k) continue;
      const float value = place == 0 ? w.pair[j].x : w.pair[j].y;
      StoreElement(out, output_type, long(at.row) * p.output_stride + k,
                   has_column ? value : as_type<float>(0x7fc00000u));
    }
  }
}

[[kernel]] void marlin_look_up(device const uchar* codes [[buffer(MARLIN_BUFFER_CODES)]],
                               device const uchar* scales [[buffer(MARLIN_BUFFER_SCALES)]],
                               device const uchar* extras [[buffer(MARLIN_BUFFER_EXTRAS)]],
                               device const float* table [[buffer(MARLIN_BUFFER_TABLE)]],
                               device const uchar* ids [[buffer(MARLIN_BUFFER_INDICES)]],
                               device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                               device atomic_int* error [[buffer(MARLIN_BUFFER_INDEX_ERROR)]],
                               constant LookUpWeightParameters& p
                               [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               ushort simdgroup [[simdgroup_index_in_threadgroup]],
                               ushort simdgroups [[simdgroups_per_threadgroup]],
                               ushort lane [[thread_index_in_simdgroup]]) {
  const LookUpPlace at = {int(group.y), int(group.x) * simdgroups + simdgroup, lane};
  const long id = IndexAt(ids, p.ids, at.row);
  if (!IsIndex(id, p.ids)) {
    if (at.chunk == 0 && lane == 0) StoreIndexError(ids, p.ids, error);
    return;
  }
  LookUpChunk({codes, scales, extras, table}, int(id), true, at, out, p.weights);
}

[[kernel]] void marlin_look_up_i32(device const uchar* codes [[buffer(MARLIN_BUFFER_CODES)]],
                                   device const uchar* scales [[buffer(MARLIN_BUFFER_SCALES)]],
                                   device const uchar* extras [[buffer(MARLIN_BUFFER_EXTRAS)]],
                                   device const float* table [[buffer(MARLIN_BUFFER_TABLE)]],
                                   device const int* ids [[buffer(MARLIN_BUFFER_INPUT)]],
                                   device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                   constant Parameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                   uint2 group [[threadgroup_position_in_grid]],
                                   ushort simdgroup [[simdgroup_index_in_threadgroup]],
                                   ushort simdgroups [[simdgroups_per_threadgroup]],
                                   ushort lane [[thread_index_in_simdgroup]]) {
  const LookUpPlace at = {int(group.y), int(group.x) * simdgroups + simdgroup, lane};
  const int id = ids[at.row];
  const bool valid = id >= 0 && id < p.n;
  LookUpChunk({codes, scales, extras, table}, valid ? id : 0, valid, at, out, p);
}
