// The rows of a step, their sequences, and where their keys are. Wrong values are never followed:
// CheckRows (check_rows.h) reports them.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_ATTEND_ROWS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_ATTEND_ROWS_H_

#include "backends/metal/kernels/attention/attend_parameters.h"
#include "backends/metal/kernels/attention/cache_elements.h"
#include "backends/metal/kernels/constants.h"

namespace marlin {
namespace kernels {

/// The buffers of a launch. Those that are not of its kind of keys are not read.
struct AttendMemory {
  device const uchar* queries;
  device const uchar* keys;
  device const uchar* values;
  device uchar* out;
  device const float* sinks;
  device float* sums;
  device const int* positions;
  device const int* first_rows;
  device const int* block_tables;
};

/// Where a launch's queries are, of a buffer of their own or of the results'.
static inline device const uchar* QueriesOf(device const uchar* queries, device const uchar* out,
                                            constant AttendParameters& p) {
  return p.query_offset < 0 ? queries : out + p.query_offset;
}

/// Called by a threadgroup that has loaded its queries: they may be where its results go.
static METAL_FUNC void KeepQueries(constant AttendParameters& p) {
  if (p.query_offset >= 0) metal::threadgroup_barrier(metal::mem_flags::mem_device);
}

/// Rows [begin, end) of a sequence, within the rows that there are.
struct RowSpan {
  int begin;
  int end;
};

static inline RowSpan RowsOfSequence(device const int* first_rows, int sequence,
                                     constant PagedRows& p) {
  const int begin = metal::clamp(first_rows[sequence], 0, p.rows);
  return {begin, metal::clamp(first_rows[sequence + 1], begin, p.rows)};
}

/// The last sequence that begins at or before a row.
static inline int SequenceOf(device const int* first_rows, int row, constant PagedRows& p) {
  // Where every sequence has one row, as in decode, the first guess is right.
  if (row < p.sequences && first_rows[row] == row && first_rows[row + 1] > row) return row;
  int low = 0;
  int high = p.sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_rows[middle] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// The first byte of a cache's part of a page; null if there is no such page.
static inline device const uchar* PageOf(int page, int element_bytes, constant PagedRows& p) {
  if (page < 0) return nullptr;
  const int slab = page / p.slab_pages;
  if (slab >= p.slab_count || p.slabs[slab] == 0) return nullptr;
  const long element = (page - slab * p.slab_pages) * p.page_stride + p.first_element;
  return (device const uchar*)ulong(p.slabs[slab]) + element * element_bytes;
}

/// A thread's simdgroup in its threadgroup, and its lane.
struct LanePlace {
  ushort simdgroup;
  ushort lane;
};

/// A row and the keys [first, end) that it sees.
struct VisibleRow {
  int row;  ///< Negative: the launch has nothing to do for it.
  int sequence;
  int first;
  int end;
};

/// The first key that the query at a position sees.
static inline int FirstVisibleKey(int position, constant AttendParameters& p) {
  if (p.window <= 0) return 0;
  return p.chunked ? position / p.window * p.window : metal::max(position - p.window + 1, 0);
}

/// Row `row` of a sequence. Keys beyond the block table are left out.
static inline VisibleRow RowAtPosition(AttendMemory memory, int row, int sequence,
                                       constant AttendParameters& p) {
  VisibleRow visible = {row, sequence, 0, 0};
  if (!paged_keys) {
    const int position = p.length - p.pages.rows + row;
    visible.first = FirstVisibleKey(position, p);
    visible.end = position + 1;
    return visible;
  }
  const int position = memory.positions[row];
  if (position < 0) {
    visible.row = -1;
    return visible;
  }
  const int room = p.pages.blocks * p.pages.page_tokens;
  visible.first = metal::min(FirstVisibleKey(position, p), room);
  visible.end = metal::min(position, room - 1) + 1;
  return visible;
}

/// The row of an index of the grid.
static inline VisibleRow RowOfIndex(AttendMemory memory, int index, constant AttendParameters& p) {
  VisibleRow none = {-1, 0, 0, 0};
  if (!paged_keys) return RowAtPosition(memory, index, 0, p);
  const int in_order = p.rows_of_sequence;
  const int sequence =
      in_order > 0 ? index / in_order : SequenceOf(memory.first_rows, index, p.pages);
  const RowSpan rows = RowsOfSequence(memory.first_rows, sequence, p.pages);
  const int row = in_order > 0 ? rows.begin + index % in_order : index;
  const int tokens = rows.end - rows.begin;
  if (row < rows.begin || row >= rows.end || tokens < p.least_tokens || tokens > p.most_tokens) {
    return none;
  }
  return RowAtPosition(memory, row, sequence, p);
}

/// Where a KV head's keys of a block, from one of them on, and their values are.
struct KeyBlock {
  device const uchar* keys;  ///< Null: there is no page.
  device const uchar* values;
};

static inline KeyBlock FindKeys(AttendMemory memory, int sequence, int kv_head, int key,
                                constant AttendParameters& p) {
  const int key_bytes = CacheElementBytes(key_type);
  const int value_bytes = CacheElementBytes(value_type);
  KeyBlock block = {memory.keys, memory.values};
  int place = key;
  if (paged_keys) {
    const int number = key / p.pages.page_tokens;
    place = key - number * p.pages.page_tokens;
    const int page = memory.block_tables[long(sequence) * p.pages.blocks + number];
    block.keys = PageOf(page, key_bytes, p.pages);
    if (block.keys == nullptr) return block;
    block.values = block.keys + p.first_value * value_bytes;
  }
  block.keys += (place * p.key_stride + kv_head * p.key_head_stride) * key_bytes;
  block.values += (place * p.value_stride + kv_head * p.value_head_stride) * value_bytes;
  return block;
}

constant constexpr float kLog2E = 1.44269504088896340736f;

/// Below every score but -Inf, which weighs nothing either. Finite, so that no compiler option may
/// assume it away.
constant constexpr float kLeastFloat = -3.402823466e38f;
static inline float NoScore() { return kLeastFloat; }

/// e^(score - origin). The difference comes first: it may be one of the largest numbers.
static inline float WeightOf(float score, float origin) {
  return metal::exp2((score - origin) * kLog2E);
}

/// The factor that rescales sums from a largest score to another.
static inline float RescaleFactor(float before, float after) {
  return before == after ? 1.0f : WeightOf(before, after);
}

/// The score of a product of a scaled query and a key.
static inline float ScoreOf(float product, constant AttendParameters& p) {
  return p.softcap == 0.0f ? product : p.softcap * metal::precise::tanh(product / p.softcap);
}

/// The running sums of a query head: one feature of them, and what all features share.
struct HeadSums {
  float largest;
  float weights;
  float value;
};

static inline HeadSums NoSums() { return {NoScore(), 0.0f, 0.0f}; }

/// Adds the sums of the next segment. One without a visible key is skipped; a NaN score gives a NaN
/// sum, which is not.
static inline HeadSums AddSegment(HeadSums total, HeadSums part) {
  if (part.largest == NoScore() && part.weights == 0.0f) return total;
  const float largest = metal::fmax(total.largest, part.largest);
  const float old_factor = RescaleFactor(total.largest, largest);
  const float new_factor = RescaleFactor(part.largest, largest);
  return {largest, metal::fma(part.weights, new_factor, total.weights * old_factor),
          metal::fma(part.value, new_factor, total.value * old_factor)};
}

/// A feature of the result: divides by the sum of weights, to which a sink adds.
static inline float FinishHead(HeadSums sums, int head, device const float* sinks,
                               constant AttendParameters& p) {
  if (p.has_sinks == 0) return sums.value / sums.weights;
  const float sink = sinks[head];
  const float largest = metal::fmax(sums.largest, sink);
  const float factor = RescaleFactor(sums.largest, largest);
  const float weights = metal::fma(sums.weights, factor, RescaleFactor(sink, largest));
  return sums.value * factor / weights;
}

/// The sums of a query head over a segment of a row, in memory. `segment` counts from the first
/// that the row sees.
static inline device float* SumsOf(device float* sums, int index, int head, int segment,
                                   constant AttendParameters& p) {
  const long heads = long(p.kv_heads) * p.group;
  return sums + ((index * heads + head) * p.segments + segment) * PartialFloats(p.value_dim);
}

/// A feature of such sums; with the first one goes what all share.
static inline void StoreSums(device float* to, int feature, HeadSums sums) {
  if (feature == 0) {
    to[0] = sums.largest;
    to[1] = sums.weights;
  }
  to[2 + feature] = sums.value;
}

static inline HeadSums LoadSums(device const float* from, int feature) {
  return {from[0], from[1], from[2 + feature]};
}

static inline void StoreAttended(device uchar* out, int row, int head, int feature, float value,
                                 constant AttendParameters& p) {
  StoreElement(out, output_type, row * p.out_stride + head * p.out_head_stride + feature, value);
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_ATTEND_ROWS_H_
