// Norms of rows.
//
//   rows_norm      out = x / sqrt(mean(x^2) + epsilon) * weight
//   rows_add_norm  x += block, and then the same
//   rows_center    x -= mean(x)
//
// NormSimdgroups simdgroups have a row, whose columns are read twice, the second time from a cache:
// a row is at most a few KiB. Threadgroup memory: 256 bytes.
#include "backends/metal/kernels/rows/rows_norm.h"

using namespace metal;
using namespace marlin::kernels;

/// A thread's place in the grid.
struct NormThread {
  int row;
  int first;  ///< Its first column.
  int step;
};

static inline NormThread PlaceOf(uint group, ushort simdgroup, ushort lane, NormParameters p) {
  NormThread place;
  place.row = p.simdgroups == 1 ? int(group) * kNormRows + simdgroup : int(group);
  place.first = p.simdgroups == 1 ? lane : simdgroup * kLanes + lane;
  place.step = p.simdgroups * kLanes;
  return place;
}

static inline long StartOf(RowStrides rows, int row, NormParameters p) {
  const uint outer = uint(row) / uint(p.of_outer);
  const uint inner = uint(row) - outer * uint(p.of_outer);
  return long(outer) * rows.outer + long(inner) * rows.inner;
}

/// The sum over the threads of a row, in all of them.
static METAL_FUNC float SumOfRow(float sum, threadgroup float2* sums, ushort simdgroup, ushort lane,
                                 NormParameters p) {
  float2 total = SumOfLanes(float2(sum, 0.0f), p.one);
  if (p.simdgroups > 1) {
    if (lane == 0) sums[simdgroup] = total;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    total = SumOfLanes(lane < p.simdgroups ? sums[lane] : float2(0.0f), p.one);
  }
  return simd_broadcast_first(ValueOfSum(total));
}

[[kernel]] void rows_norm(device const uchar* x [[buffer(MARLIN_BUFFER_INPUT)]],
                          device const uchar* weight [[buffer(MARLIN_BUFFER_NORM_WEIGHT)]],
                          device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                          constant NormParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                          uint group [[threadgroup_position_in_grid]],
                          ushort simdgroup [[simdgroup_index_in_threadgroup]],
                          ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float2 sums[kMostNormSimdgroups];
  const NormThread place = PlaceOf(group, simdgroup, lane, p);
  if (place.row >= p.rows) return;
  x = MemoryOf(p.x, x, out);
  out += p.out.first;
  const long from = StartOf(p.x, place.row, p);
  float squares = 0.0f;
  for (int c = place.first; c < p.columns; c += place.step) {
    const float value = LoadElement(x, input_type, from + c);
    squares = fma(value, value, squares);
  }
  const float factor = RmsFactor(SumOfRow(squares, sums, simdgroup, lane, p), p.columns, p.epsilon);
  const long to = StartOf(p.out, place.row, p);
  for (int c = place.first; c < p.columns; c += place.step) {
    const float value = LoadElement(x, input_type, from + c);
    StoreElement(out, output_type, to + c,
                 TimesNorm(value, factor, LoadElement(weight, scale_type, c)));
  }
}

[[kernel]] void rows_add_norm(device const uchar* block [[buffer(MARLIN_BUFFER_ROW_OTHER)]],
                              device uchar* x [[buffer(MARLIN_BUFFER_INPUT)]],
                              device const uchar* weight [[buffer(MARLIN_BUFFER_NORM_WEIGHT)]],
                              device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                              constant NormParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                              uint group [[threadgroup_position_in_grid]],
                              ushort simdgroup [[simdgroup_index_in_threadgroup]],
                              ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float2 sums[kMostNormSimdgroups];
  const NormThread place = PlaceOf(group, simdgroup, lane, p);
  if (place.row >= p.rows) return;
  const long at = StartOf(p.x, place.row, p);
  const long of_block = StartOf(p.block, place.row, p);
  float squares = 0.0f;
  for (int c = place.first; c < p.columns; c += place.step) {
    const float sum =
        LoadElement(x, input_type, at + c) + LoadElement(block, extra_type, of_block + c);
    StoreElement(x, input_type, at + c, sum);
    const float value = Rounded(sum, input_type);
    squares = fma(value, value, squares);
  }
  const float factor = RmsFactor(SumOfRow(squares, sums, simdgroup, lane, p), p.columns, p.epsilon);
  const long to = StartOf(p.out, place.row, p);
  for (int c = place.first; c < p.columns; c += place.step) {
    const float value = LoadElement(x, input_type, at + c);
    StoreElement(out, output_type, to + c,
                 TimesNorm(value, factor, LoadElement(weight, scale_type, c)));
  }
}

[[kernel]] void rows_center(device uchar* x [[buffer(MARLIN_BUFFER_INPUT)]],
                            constant NormParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                            uint group [[threadgroup_position_in_grid]],
                            ushort simdgroup [[simdgroup_index_in_threadgroup]],
                            ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float2 sums[kMostNormSimdgroups];
  const NormThread place = PlaceOf(group, simdgroup, lane, p);
  if (place.row >= p.rows) return;
  const long at = StartOf(p.x, place.row, p);
  float sum = 0.0f;
  for (int c = place.first; c < p.columns; c += place.step) {
    sum += LoadElement(x, input_type, at + c);
  }
  const float mean = SumOfRow(sum, sums, simdgroup, lane, p) / float(p.columns);
  for (int c = place.first; c < p.columns; c += place.step) {
    StoreElement(x, input_type, at + c, LoadElement(x, input_type, at + c) - mean);
  }
}
