// attend_tile_D: attention of many tokens, for heads of up to D features (attend_tile.h).
#include "backends/metal/kernels/attention/attend_tile.h"
#include "backends/metal/kernels/attention/check_rows.h"

using namespace metal;
using namespace marlin::kernels;

template <int kMostFeatures>
[[kernel]] void attend_tile(device const uchar* queries [[buffer(MARLIN_BUFFER_QUERIES)]],
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
  threadgroup TileScratch<kMostFeatures> scratch[1];
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
  AttendTile<kMostFeatures>(scratch, memory, group, {simdgroup, lane}, p);
}

#define MARLIN_ATTEND_TILE(name, ...) \
  template                            \
      [[host_name(name)]] [[kernel]] decltype(attend_tile<__VA_ARGS__>) attend_tile<__VA_ARGS__>;

MARLIN_ATTEND_TILE("attend_tile_64", 64)
MARLIN_ATTEND_TILE("attend_tile_128", 128)
MARLIN_ATTEND_TILE("attend_tile_256", 256)
MARLIN_ATTEND_TILE("attend_tile_576", 576)
