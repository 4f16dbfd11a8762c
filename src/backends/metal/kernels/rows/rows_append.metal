// rotate_append: prepares a step's rows for attention over a paged KV cache.
//
//   queries  RMS norm and RoPE of every head, in place
//   keys     the same, to the pages of their rows' positions
//   values   to the pages
//
// append_to_cache: the same without queries, norms and RoPE. A simdgroup has a head of a row, whose
// features no other reads. A threadgroup of its own checks rows and pages (check_rows.h): a row
// that has no page, or is not at its sequence's next position, is not stored.
// Threadgroup memory: 32 bytes.
#include "backends/metal/kernels/attention/check_rows.h"
#include "backends/metal/kernels/rows/append_parameters.h"
#include "backends/metal/kernels/rows/rows_rotary.h"

using namespace metal;
using namespace marlin::kernels;

/// The first byte of the page of a row's position; null if there is none.
static METAL_FUNC device uchar* PageOfRow(AttendMemory memory, int row, int position,
                                          constant AppendParameters& p) {
  constant PagedRows& pages = p.cache.pages;
  const int sequence = SequenceOf(memory.first_rows, row, pages);
  const int begin = RowsOfSequence(memory.first_rows, sequence, pages).begin;
  // Rows before a sequence's first are in none. Equal positions would write the same place.
  if (row < begin || position != long(memory.positions[begin]) + (row - begin)) return nullptr;
  const int block = position / pages.page_tokens;
  if (block >= pages.blocks) return nullptr;
  const int page = memory.block_tables[long(sequence) * pages.blocks + block];
  return (device uchar*)PageOf(page, CacheElementBytes(key_type), pages);
}

static inline device uchar* ElementAt(device uchar* data, int type, long index) {
  return data + index * CacheElementBytes(type);
}

/// The memory of the projections. Keys and values may be in the queries' buffer.
struct NewHeads {
  device uchar* queries;
  device const uchar* keys;
  device const uchar* values;
  device const uchar* query_norm;
  device const uchar* key_norm;
  device const float* frequencies;
};

/// Head `number` of a row, a query.
static METAL_FUNC Head QueryHead(NewHeads heads, int row, int number,
                                 constant AppendParameters& p) {
  Head head;
  const long at = long(row) * p.queries.outer + long(number) * p.queries.inner;
  head.to = ElementAt(heads.queries + p.queries.first, input_type, at);
  head.from = head.to;
  head.norm = p.query_norm.has ? heads.query_norm : nullptr;
  head.type = head.to_type = input_type;
  head.norm_type = p.query_norm.type;
  head.features = p.cache.key_dim;
  head.pairs = p.rotary.pairs;
  return head;
}

/// Key `number` of a row, or after the keys a value. `page` is the row's.
static METAL_FUNC Head CachedHead(NewHeads heads, device uchar* page, int row, int number,
                                  int position, constant AppendParameters& p) {
  const bool is_key = number < p.cache.kv_heads;
  const int kv_head = is_key ? number : number - p.cache.kv_heads;
  const long place = position % p.cache.pages.page_tokens;
  Head head;
  head.type = is_key ? extra_type : bias_type;
  RowStrides rows = p.values;
  if (is_key) rows = p.keys;
  const long at = long(row) * rows.outer + long(kv_head) * rows.inner;
  head.from = MemoryOf(rows, is_key ? heads.keys : heads.values, heads.queries) +
              at * CacheElementBytes(head.type);
  const long to = is_key ? kv_head * p.cache.key_head_stride + place * p.cache.key_stride
                         : p.cache.first_value + kv_head * p.cache.value_head_stride +
                               place * p.cache.value_stride;
  head.to = ElementAt(page, key_type, to);
  head.to_type = key_type;
  head.norm = is_key && p.key_norm.has ? heads.key_norm : nullptr;
  head.norm_type = p.key_norm.type;
  head.features = is_key ? p.cache.key_dim : p.cache.value_dim;
  head.pairs = is_key ? p.rotary.pairs : 0;
  return head;
}

static METAL_FUNC void AppendRows(threadgroup uint* scratch, NewHeads heads, AttendMemory memory,
                                  device int4* report, uint2 group, ushort simdgroup, ushort lane,
                                  constant AppendParameters& p) {
  if (group.y == 0) {
    if (group.x == 0) CheckRows(scratch, memory, report, simdgroup * kLanes + lane, p.cache);
    return;
  }
  const int row = int(group.y) - 1;
  const int number = int(group.x) * kAttendSimdgroups + simdgroup;
  const int position = memory.positions[row];
  if (position < 0 || number >= p.heads + p.cache.kv_heads + p.value_heads) return;
  Head head;
  if (number < p.heads) {
    head = QueryHead(heads, row, number, p);
  } else {
    device uchar* const page = PageOfRow(memory, row, position, p);
    if (page == nullptr) return;
    head = CachedHead(heads, page, row, number - p.heads, position, p);
  }
  const float factor = FactorOfHead(head, p.epsilon, p.one, lane);
  StoreHead(head, factor, heads.frequencies, p.rotary, position, lane);
}

[[kernel]] void rotate_append(device const uchar* keys [[buffer(MARLIN_BUFFER_NEW_KEYS)]],
                              device const uchar* values [[buffer(MARLIN_BUFFER_NEW_VALUES)]],
                              device const uchar* query_norm [[buffer(MARLIN_BUFFER_QUERY_NORM)]],
                              device const float* frequencies [[buffer(MARLIN_BUFFER_FREQUENCIES)]],
                              device const uchar* key_norm [[buffer(MARLIN_BUFFER_KEY_NORM)]],
                              device uchar* queries [[buffer(MARLIN_BUFFER_OUTPUT)]],
                              device const int* positions [[buffer(MARLIN_BUFFER_POSITIONS)]],
                              device const int* first_rows [[buffer(MARLIN_BUFFER_FIRST_ROWS)]],
                              device const int* block_tables [[buffer(MARLIN_BUFFER_BLOCK_TABLES)]],
                              device int4* report [[buffer(MARLIN_BUFFER_ROW_ERROR)]],
                              constant AppendParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                              uint2 group [[threadgroup_position_in_grid]],
                              ushort simdgroup [[simdgroup_index_in_threadgroup]],
                              ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup uint scratch[kAttendSimdgroups];
  const NewHeads heads = {queries, keys, values, query_norm, key_norm, frequencies};
  AttendMemory memory = {};
  memory.positions = positions;
  memory.first_rows = first_rows;
  memory.block_tables = block_tables;
  AppendRows(scratch, heads, memory, report, group, simdgroup, lane, p);
}
