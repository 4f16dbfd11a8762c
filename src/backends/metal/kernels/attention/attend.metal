// attend_H_D: attention of a row's H query heads of up to D features (attend.h), and attend_merge.
#include "backends/metal/kernels/attention/attend.h"
#include "backends/metal/kernels/attention/check_rows.h"

using namespace metal;
using namespace marlin::kernels;

template <int kHeads, int kFeatures>
[[kernel]] void attend(device const uchar* queries [[buffer(MARLIN_BUFFER_QUERIES)]],
                       device const uchar* keys [[buffer(MARLIN_BUFFER_KEYS)]],
                       device const uchar* values [[buffer(MARLIN_BUFFER_VALUES)]],
                       device uchar* out [[buffer(MARLIN_BUFFER_ATTENDED)]],
                       device const float* sinks [[buffer(MARLIN_BUFFER_SINKS)]],
                       device float* sums [[buffer(MARLIN_BUFFER_SUMS)]],
                       device const int* positions [[buffer(MARLIN_BUFFER_POSITIONS)]],
                       device const int* first_rows [[buffer(MARLIN_BUFFER_FIRST_ROWS)]],
                       device const int* block_tables [[buffer(MARLIN_BUFFER_BLOCK_TABLES)]],
                       device int4* report [[buffer(MARLIN_BUFFER_ROW_ERROR)]],
                       constant AttendParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                       uint3 group [[threadgroup_position_in_grid]],
                       ushort simdgroup [[simdgroup_index_in_threadgroup]],
                       ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup AttendScratch<kHeads, kFeatures> scratch[1];
  threadgroup uint least[kAttendSimdgroups];
  const AttendMemory memory = {QueriesOf(queries, out, p),
                               keys,
                               values,
                               out + p.out_offset,
                               sinks,
                               sums,
                               positions,
                               first_rows,
                               block_tables};
  if (paged_keys && p.checks && group.x == 0 && group.y == 0 && group.z == 0) {
    CheckRows(least, memory, report, simdgroup * kLanes + lane, p);
  }
  Attend<kHeads, kFeatures>(scratch, memory, group, simdgroup, lane, p);
}

#define MARLIN_ATTEND(name, ...) \
  template [[host_name(name)]] [[kernel]] decltype(attend<__VA_ARGS__>) attend<__VA_ARGS__>;

MARLIN_ATTEND("attend_1_64", 1, 2)
MARLIN_ATTEND("attend_4_64", 4, 2)
MARLIN_ATTEND("attend_8_64", 8, 2)
MARLIN_ATTEND("attend_1_128", 1, 4)
MARLIN_ATTEND("attend_4_128", 4, 4)
MARLIN_ATTEND("attend_8_128", 8, 4)
MARLIN_ATTEND("attend_1_256", 1, 8)
MARLIN_ATTEND("attend_4_256", 4, 8)
MARLIN_ATTEND("attend_1_512", 1, 16)
MARLIN_ATTEND("attend_2_512", 2, 16)
MARLIN_ATTEND("attend_1_1024", 1, 32)

[[kernel]] void attend_merge(device uchar* out [[buffer(MARLIN_BUFFER_ATTENDED)]],
                             device const float* sinks [[buffer(MARLIN_BUFFER_SINKS)]],
                             device float* sums [[buffer(MARLIN_BUFFER_SUMS)]],
                             device const int* positions [[buffer(MARLIN_BUFFER_POSITIONS)]],
                             device const int* first_rows [[buffer(MARLIN_BUFFER_FIRST_ROWS)]],
                             constant AttendParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_index_in_threadgroup]]) {
  const AttendMemory memory = {nullptr,   nullptr,    nullptr, out + p.out_offset, sinks, sums,
                               positions, first_rows, nullptr};
  MergeSegments(memory, group, thread_index, p);
}
