// marlin_look_up: embedding lookup, out[i, k] = W[k, ids[i]], rounded once to the output type. The
// embedding is stored as GEMM weights.
//
// Each simdgroup writes 128 k of one row; only the 8 lanes that hold the selected column store.
// marlin_look_up reports ids that are out of range; marlin_look_up_i32, which other frameworks run,
// fills their rows with NaN.
#include "backends/metal/kernels/rows/look_up.h"

using namespace metal;
using namespace marlin::kernels;

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
