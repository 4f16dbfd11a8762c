// marlin_gather_gemv: a row of A and a matrix of a stack per threadgroup (gather_gemv.h).
#include "backends/metal/kernels/gemm/gather_gemv.h"

using namespace metal;
using namespace marlin::kernels;

[[kernel]] void marlin_gather_gemv(device const uchar* codes [[buffer(MARLIN_BUFFER_CODES)]],
                                   device const uchar* scales [[buffer(MARLIN_BUFFER_SCALES)]],
                                   device const uchar* extras [[buffer(MARLIN_BUFFER_EXTRAS)]],
                                   device const float* table [[buffer(MARLIN_BUFFER_TABLE)]],
                                   device const uchar* input [[buffer(MARLIN_BUFFER_INPUT)]],
                                   device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                   device const int* ids [[buffer(MARLIN_BUFFER_MATRIX_IDS)]],
                                   device const float* global_scales
                                   [[buffer(MARLIN_BUFFER_GLOBAL_SCALES)]],
                                   constant GatherParameters& p
                                   [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                   uint2 group [[threadgroup_position_in_grid]],
                                   ushort simdgroup [[simdgroup_index_in_threadgroup]],
                                   ushort simdgroups [[simdgroups_per_threadgroup]],
                                   ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float sums[GemvSums<1, 1>::kCount];
  const MatrixStack stack = {{codes, scales, extras, table}, global_scales};
  const Input rows = {input, nullptr};
  const SimdgroupPlace place = {simdgroup, simdgroups, lane};
  GatherGemv(stack, ids, rows, out, sums, group, place, p);
}
