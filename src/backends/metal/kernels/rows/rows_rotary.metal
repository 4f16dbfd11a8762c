// Operations on heads that depend on their tokens' positions.
//
//   rows_rotary             RoPE in place, a simdgroup per head
//   rows_scale_by_position  x *= 1 + beta * ln(1 + floor((position + offset) / period))
#include "backends/metal/kernels/rows/rows_rotary.h"

using namespace metal;
using namespace marlin::kernels;

[[kernel]] void rows_rotary(device uchar* x [[buffer(MARLIN_BUFFER_OUTPUT)]],
                            device const uchar* positions [[buffer(MARLIN_BUFFER_INDICES)]],
                            device const float* frequencies [[buffer(MARLIN_BUFFER_FREQUENCIES)]],
                            device atomic_int* error [[buffer(MARLIN_BUFFER_INDEX_ERROR)]],
                            constant RotateParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                            uint2 group [[threadgroup_position_in_grid]],
                            ushort simdgroup [[simdgroup_index_in_threadgroup]],
                            ushort lane [[thread_index_in_simdgroup]]) {
  const int number = int(group.x) * kRotarySimdgroups + simdgroup;
  if (number >= p.heads) return;
  const long position = IndexAt(positions, p.positions, long(group.y));
  if (!IsIndex(position, p.positions)) {
    if (number == 0 && lane == 0) StoreIndexError(positions, p.positions, error);
    return;
  }
  Head head;
  const long bytes = output_type == kElementF32 ? 4 : 2;
  head.to = x + (long(group.y) * p.x.outer + number * p.x.inner) * bytes;
  head.from = head.to;
  head.norm = nullptr;
  head.type = head.to_type = output_type;
  head.norm_type = kElementF32;
  head.features = 2 * p.rotary.pairs;
  head.pairs = p.rotary.pairs;
  StoreHead(head, 1.0f, frequencies, p.rotary, int(position), lane);
}

[[kernel]] void rows_scale_by_position(device uchar* x [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                       device const uchar* positions
                                       [[buffer(MARLIN_BUFFER_INDICES)]],
                                       device atomic_int* error
                                       [[buffer(MARLIN_BUFFER_INDEX_ERROR)]],
                                       constant PositionParameters& p
                                       [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                       uint3 group [[threadgroup_position_in_grid]],
                                       ushort thread_index [[thread_index_in_threadgroup]],
                                       ushort threads [[threads_per_threadgroup]]) {
  const long position = IndexAt(positions, p.positions, long(group.z));
  if (!IsIndex(position, p.positions)) {
    const bool first = group.x == 0 && group.y == 0 && thread_index == 0;
    if (first) StoreIndexError(positions, p.positions, error);
    return;
  }
  // An integer, so that the sum is exact where fp32 has it.
  const float periods = float((position + p.offset) / p.period + 1);
  const float factor = fma(p.beta, precise::log(periods), 1.0f);
  const long row = RowAt(p.rows.out, group);
  for (int c = FirstColumn(group, thread_index, threads); c < p.rows.columns; c += p.rows.step) {
    StoreElement(x, output_type, row + c, factor * LoadElement(x, output_type, row + c));
  }
}
