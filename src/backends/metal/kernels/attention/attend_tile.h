// AttendTile: attention of many tokens of a sequence, in fp32 with a running maximum, on matrix
// fragments.
//
//   A threadgroup takes kRows rows of a KV head: row r is query head r % group of token r / group
//   of its sequence. For every tile of 64 keys that one of them sees:
//     simdgroup s: scores of 8 keys, 8 s to 8 s + 7, with all rows       | queries
//     [kRows][features] simdgroup s: weights of kRows / 8 rows, e^(scores - maximum)       |
//     scores, then weights simdgroup s: out += weights . values, for an eighth of the features |
//     [kRows][64]
//   so that every key and value is loaded once per tile, from device memory straight into
//   fragments, and only queries, scores and weights are in threadgroup memory. The sums of 512 keys
//   are then added to the total.
//
//   Grid of threadgroups: [KV heads][tiles][segments]. With several sequences there are more places
//   than tiles; those beyond return. With one segment in the grid a threadgroup takes all keys of
//   its rows; otherwise the segments of a row go to memory as in attend.h.
//
// Tiles and segments of keys are aligned to their size, and masked weights are zero: a row's bits
// depend on its position alone, whichever tile of rows it falls into. Fragments take every fourth
// feature, as in gemm_direct.h, so that a lane loads four adjacent ones.
// Barriers: 3 per tile of keys, 2 per segment, and 2.
// Depends on the element layout of fragments (FragmentRow).
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_ATTEND_TILE_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_ATTEND_TILE_H_

#include "backends/metal/kernels/attention/attend_rows.h"
#include "backends/metal/kernels/fragments.h"

namespace marlin {
namespace kernels {

template <int kMostFeatures>
struct TileScratch {
  static constant constexpr int kRows =
      kMostFeatures <= kTileFeatures32 ? 32 : (kMostFeatures <= kTileFeatures16 ? 16 : 8);
  // Padded so that the rows of a fragment are in different banks.
  float queries[kRows][kMostFeatures + 4];
  float scores[kRows][kTileKeys + 4];
  float factors[kRows];
  float largest[kRows];
  float weights[kRows];
};

/// Rows [first, count) of a sequence, of which the threadgroup has the first ones.
struct QueryTile {
  int kv_head;
  int sequence;   ///< Negative: there is no such tile.
  int first_row;  ///< The first row of the sequence, in the call.
  int position;   ///< The position of the sequence's first token.
  int first;
  int count;  ///< tokens x group
};

static inline QueryTile FindTile(AttendMemory memory, int kv_head, int index, int tile_rows,
                                 constant AttendParameters& p) {
  QueryTile tile = {
      kv_head, 0, 0, p.length - p.pages.rows, index * tile_rows, p.pages.rows * p.group};
  if (!paged_keys) return tile;
  int left = index;
  int last = 0;  // Rows of wrong sequences may overlap; every row has one tile all the same.
  for (int s = 0; s < p.pages.sequences; ++s) {
    RowSpan rows = RowsOfSequence(memory.first_rows, s, p.pages);
    rows.begin = metal::max(rows.begin, last);
    last = metal::max(rows.end, last);
    const int tokens = rows.end - rows.begin;
    if (tokens < p.least_tokens) continue;
    const int tiles = (tokens * p.group + tile_rows - 1) / tile_rows;
    if (left >= tiles) {
      left -= tiles;
      continue;
    }
    // A position beyond the block table is as good as its end.
    const int position =
        metal::min(memory.positions[rows.begin], p.pages.blocks * p.pages.page_tokens);
    tile = {kv_head,  position < 0 ? -1 : s, rows.begin,
            position, left * tile_rows,      tokens * p.group};
    return tile;
  }
  tile.sequence = -1;
  return tile;
}

/// Keys [first, end).
struct KeyRange {
  int first;
  int end;
};

/// The keys that row `row` of a tile sees. Rows beyond the last one are as it.
static inline KeyRange KeysOfRow(QueryTile tile, int row, constant AttendParameters& p) {
  const int at = metal::min(tile.first + row, tile.count - 1);
  const int position = tile.position + at / p.group;
  const int room = paged_keys ? p.pages.blocks * p.pages.page_tokens : p.length;
  return {metal::min(FirstVisibleKey(position, p), room), metal::min(position, room - 1) + 1};
}

/// The fragments of scores of a simdgroup's keys.
template <int kRowFragments>
struct ScoreFragments {
  simdgroup_float8x8 row[kRowFragments];
};

/// A lane's elements of four fragments of queries for each eight rows: 32 features.
template <int kRowFragments>
struct QueryElements {
  float4 first[kRowFragments];
  float4 second[kRowFragments];
};

/// A lane's elements of a fragment of weights for each eight rows.
template <int kRowFragments>
struct WeightElements {
  float2 row[kRowFragments];
};

/// The accumulators of a simdgroup: its features of all rows.
template <int kRowFragments, int kColumns>
struct OutFragments {
  simdgroup_float8x8 at[kRowFragments][kColumns];
};

template <int kMostFeatures>
static METAL_FUNC void LoadTileQueries(threadgroup TileScratch<kMostFeatures>* scratch,
                                       device const uchar* queries, QueryTile tile, LanePlace place,
                                       constant AttendParameters& p) {
  const int padded = (p.key_dim + 31) / 32 * 32;
  for (int r = place.simdgroup; r < TileScratch<kMostFeatures>::kRows; r += kAttendSimdgroups) {
    const int at = tile.first + r;
    const bool inside = at < tile.count;
    const long from = (tile.first_row + at / p.group) * p.query_stride +
                      (tile.kv_head * p.group + at % p.group) * p.query_head_stride;
    for (int i = place.lane; i < padded; i += kLanes) {
      const bool there = inside && i < p.key_dim;
      scratch->queries[r][i] =
          there ? LoadElement(queries, input_type, from + i) * p.query_scale : 0.0f;
    }
  }
}

/// Four features of a key from `feature` on, zeros beyond the last one.
static inline float4 LoadKeyQuad(device const uchar* keys, long key, int feature, bool there,
                                 constant AttendParameters& p) {
  float4 quad = float4(0.0f);
  if (!there || feature >= p.key_dim) return quad;
  const long at = key * p.key_stride + feature;
  if (aligned_keys) return LoadCacheQuad(keys, key_type, at);
  MARLIN_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (feature + i < p.key_dim) quad[i] = LoadCacheElement(keys, key_type, at + i);
  }
  return quad;
}

static inline float2 LoadValuePair(device const uchar* values, long key, int feature, bool there,
                                   constant AttendParameters& p) {
  float2 pair = float2(0.0f);
  if (!there || feature >= p.value_dim) return pair;
  const long at = key * p.value_stride + feature;
  if (aligned_keys) return LoadCachePair(values, value_type, at);
  pair.x = LoadCacheElement(values, value_type, at);
  if (feature + 1 < p.value_dim) pair.y = LoadCacheElement(values, value_type, at + 1);
  return pair;
}

/// Scores of 8 keys from `key` on, which are in one page, with all rows.
template <int kMostFeatures>
static METAL_FUNC void ScoreKeys(threadgroup TileScratch<kMostFeatures>* scratch,
                                 AttendMemory memory, QueryTile tile, int key, KeyRange seen,
                                 LanePlace place, constant AttendParameters& p) {
  constexpr int kRowFragments = TileScratch<kMostFeatures>::kRows / kSide;
  ScoreFragments<kRowFragments> scores;
  MARLIN_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    scores.row[i] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  const int column = FragmentColumn(place.lane);
  const int row = FragmentRow(place.lane);
  KeyBlock block = {nullptr, nullptr};
  if (key < seen.end && key + kSide > seen.first) {
    block = FindKeys(memory, tile.sequence, tile.kv_head, key, p);
  }
  const bool page = block.keys != nullptr;
  const bool first_there = page && key + column >= seen.first && key + column < seen.end;
  const bool second_there = page && key + column + 1 >= seen.first && key + column + 1 < seen.end;
  for (int feature = 0; feature < p.key_dim; feature += 4 * kSide) {
    const int own = feature + 4 * row;
    const float4 first = LoadKeyQuad(block.keys, column, own, first_there, p);
    const float4 second = LoadKeyQuad(block.keys, column + 1, own, second_there, p);
    QueryElements<kRowFragments> queries;
    MARLIN_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      threadgroup const float* const from =
          scratch->queries[i * kSide + row] + feature + 4 * column;
      queries.first[i] = *(threadgroup const float4*)from;
      queries.second[i] = *(threadgroup const float4*)(from + 4);
    }
    MARLIN_UNROLL
    for (int j = 0; j < 4; ++j) {
      const simdgroup_float8x8 keys = FragmentOf(float2(first[j], second[j]));
      MARLIN_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        const float2 elements = float2(queries.first[i][j], queries.second[i][j]);
        metal::simdgroup_multiply_accumulate(scores.row[i], FragmentOf(elements), keys,
                                             scores.row[i]);
      }
    }
  }
  MARLIN_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    const float2 products = ElementsOf(scores.row[i]);
    threadgroup float* const to =
        scratch->scores[i * kSide + row] + place.simdgroup * kSide + column;
    to[0] = ScoreOf(products.x, p);
    to[1] = ScoreOf(products.y, p);
  }
}

/// A simdgroup's largest scores and sums of weights of its kRows / 8 rows.
template <int kCount>
struct RowTotals {
  float largest[kCount];
  float weights[kCount];
};

/// Turns scores of 64 keys from `key` on into weights.
template <int kMostFeatures>
static METAL_FUNC void WeighKeys(
    threadgroup TileScratch<kMostFeatures>* scratch,
    thread RowTotals<TileScratch<kMostFeatures>::kRows / kAttendSimdgroups>& totals, QueryTile tile,
    int key, LanePlace place, constant AttendParameters& p) {
  constexpr int kCount = TileScratch<kMostFeatures>::kRows / kAttendSimdgroups;
  MARLIN_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const int row = place.simdgroup * kCount + i;
    const KeyRange seen = KeysOfRow(tile, row, p);
    threadgroup float* const scores = scratch->scores[row];
    const int lane = place.lane;
    float low = scores[lane];
    float high = scores[lane + kLanes];
    if (key + lane < seen.first || key + lane >= seen.end) low = NoScore();
    if (key + lane + kLanes < seen.first || key + lane + kLanes >= seen.end) high = NoScore();
    const float largest = metal::fmax(metal::simd_max(metal::fmax(low, high)), totals.largest[i]);
    const float origin = largest == NoScore() ? 0.0f : largest;
    low = WeightOf(low, origin);
    high = WeightOf(high, origin);
    const float factor = RescaleFactor(totals.largest[i], largest);
    totals.weights[i] = metal::fma(totals.weights[i], factor, metal::simd_sum(low + high));
    totals.largest[i] = largest;
    scores[lane] = low;
    scores[lane + kLanes] = high;
    if (lane == 0) scratch->factors[row] = factor;
  }
}

/// The column fragments that the values need.
static inline int ValueColumns(constant AttendParameters& p) {
  constexpr int kFeatures = kAttendSimdgroups * kSide;
  return (p.value_dim + kFeatures - 1) / kFeatures;
}

/// The first of a lane's two features in column fragment f of its simdgroup's `columns`.
static inline int ValueFeature(int columns, int f, LanePlace place) {
  return place.simdgroup * columns * kSide + FragmentColumn(place.lane) * columns + 2 * f;
}

/// 32 keys from `key` on, whose weights begin at `column` of the scores' rows, of which the tile's
/// rows see keys `seen`. masked: not all rows see all of them.
struct ValueBlock {
  int key;
  int column;
  KeyRange seen;
  bool masked;
};

/// Adds the values of a block that are not finite to the rows that see their keys: in products with
/// masked weights they would be NaN.
template <int kMostFeatures, int kColumns>
static METAL_FUNC void AddInfinities(
    thread OutFragments<TileScratch<kMostFeatures>::kRows / kSide, kColumns>& out,
    threadgroup TileScratch<kMostFeatures>* scratch, device const uchar* values, QueryTile tile,
    ValueBlock block, int columns, LanePlace place, constant AttendParameters& p) {
  for (int k = 0; k < kBlockKeys; ++k) {
    const int key = block.key + k;
    const bool there = key >= block.seen.first && key < block.seen.end;
    MARLIN_UNROLL
    for (int f = 0; f < kColumns; ++f) {
      if (f >= columns) continue;
      const float2 pair = LoadValuePair(values, k, ValueFeature(columns, f, place), there, p);
      const bool first = !IsFinite(pair.x);
      const bool second = !IsFinite(pair.y);
      if (!first && !second) continue;
      MARLIN_UNROLL
      for (int i = 0; i < TileScratch<kMostFeatures>::kRows / kSide; ++i) {
        const int row = i * kSide + FragmentRow(place.lane);
        const KeyRange of_row = KeysOfRow(tile, row, p);
        if (key < of_row.first || key >= of_row.end) continue;
        const float weight = scratch->scores[row][block.column + k];
        if (first) out.at[i][f].thread_elements()[0] += weight * pair.x;
        if (second) out.at[i][f].thread_elements()[1] += weight * pair.y;
      }
    }
  }
}

/// Sets elements that are not finite to 0; returns whether there were any.
static inline bool ClearInfinities(thread float2& pair) {
  const bool first = !IsFinite(pair.x);
  const bool second = !IsFinite(pair.y);
  if (first) pair.x = 0.0f;
  if (second) pair.y = 0.0f;
  return first || second;
}

/// Adds the weighted values of a block.
template <int kMostFeatures, int kColumns>
static METAL_FUNC void AddValues(
    thread OutFragments<TileScratch<kMostFeatures>::kRows / kSide, kColumns>& out,
    threadgroup TileScratch<kMostFeatures>* scratch, AttendMemory memory, QueryTile tile,
    ValueBlock block, LanePlace place, constant AttendParameters& p) {
  constexpr int kRowFragments = TileScratch<kMostFeatures>::kRows / kSide;
  if (block.key >= block.seen.end || block.key + kBlockKeys <= block.seen.first) return;
  const KeyBlock found = FindKeys(memory, tile.sequence, tile.kv_head, block.key, p);
  if (found.keys == nullptr) return;
  const int columns = ValueColumns(p);
  const int row = FragmentRow(place.lane);
  bool infinite = false;
  for (int k = 0; k < kBlockKeys; k += kSide) {
    const int key = block.key + k + row;
    const bool there = key >= block.seen.first && key < block.seen.end;
    const int column = block.column + k + FragmentColumn(place.lane);
    WeightElements<kRowFragments> weights;
    MARLIN_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      weights.row[i] = *(threadgroup const float2*)(scratch->scores[i * kSide + row] + column);
    }
    MARLIN_UNROLL
    for (int f = 0; f < kColumns; ++f) {
      if (f >= columns) continue;
      float2 pair = LoadValuePair(found.values, k + row, ValueFeature(columns, f, place), there, p);
      if (block.masked && ClearInfinities(pair)) infinite = true;
      const simdgroup_float8x8 values = FragmentOf(pair);
      MARLIN_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        metal::simdgroup_multiply_accumulate(out.at[i][f], FragmentOf(weights.row[i]), values,
                                             out.at[i][f]);
      }
    }
  }
  if (!metal::simd_any(infinite)) return;
  AddInfinities<kMostFeatures, kColumns>(out, scratch, found.values, tile, block, columns, place,
                                         p);
}

/// Rescales the sums to the rows' new maxima.
template <int kRowFragments, int kColumns>
static METAL_FUNC void Rescale(thread OutFragments<kRowFragments, kColumns>& out,
                               threadgroup const float* factors, ushort lane) {
  MARLIN_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    const float factor = factors[i * kSide + FragmentRow(lane)];
    MARLIN_UNROLL
    for (int f = 0; f < kColumns; ++f) {
      out.at[i][f] = FragmentOf(ElementsOf(out.at[i][f]) * factor);
    }
  }
}

/// Clears the sums of a segment.
template <int kRowFragments, int kColumns, int kCount>
static METAL_FUNC void ClearTile(thread OutFragments<kRowFragments, kColumns>& out,
                                 thread RowTotals<kCount>& totals) {
  MARLIN_UNROLL
  for (int i = 0; i < kCount; ++i) {
    totals.largest[i] = NoScore();
    totals.weights[i] = 0.0f;
  }
  MARLIN_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    MARLIN_UNROLL
    for (int f = 0; f < kColumns; ++f) {
      out.at[i][f] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
}

/// Keys [seen.first, seen.end) of one segment.
template <int kMostFeatures, int kColumns>
static METAL_FUNC void AddTileSegment(
    thread OutFragments<TileScratch<kMostFeatures>::kRows / kSide, kColumns>& out,
    thread RowTotals<TileScratch<kMostFeatures>::kRows / kAttendSimdgroups>& totals,
    threadgroup TileScratch<kMostFeatures>* scratch, AttendMemory memory, QueryTile tile,
    KeyRange seen, LanePlace place, constant AttendParameters& p) {
  constexpr int kRows = TileScratch<kMostFeatures>::kRows;
  const int last_first = KeysOfRow(tile, kRows - 1, p).first;
  const int first_end = KeysOfRow(tile, 0, p).end;
  for (int key = seen.first / kTileKeys * kTileKeys; key < seen.end; key += kTileKeys) {
    ScoreKeys<kMostFeatures>(scratch, memory, tile, key + place.simdgroup * kSide, seen, place, p);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    WeighKeys<kMostFeatures>(scratch, totals, tile, key, place, p);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    Rescale<kRows / kSide, kColumns>(out, scratch->factors, place.lane);
    const bool masked = key < last_first || key + kTileKeys > first_end;
    for (int column = 0; column < kTileKeys; column += kBlockKeys) {
      const ValueBlock block = {key + column, column, seen, masked};
      AddValues<kMostFeatures, kColumns>(out, scratch, memory, tile, block, place, p);
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
}

/// Adds the sums of a segment, as AddSegment does.
template <int kMostFeatures, int kColumns>
static METAL_FUNC void FoldTile(
    thread OutFragments<TileScratch<kMostFeatures>::kRows / kSide, kColumns>& out,
    thread RowTotals<TileScratch<kMostFeatures>::kRows / kAttendSimdgroups>& totals,
    thread OutFragments<TileScratch<kMostFeatures>::kRows / kSide, kColumns>& part,
    thread RowTotals<TileScratch<kMostFeatures>::kRows / kAttendSimdgroups>& part_totals,
    threadgroup TileScratch<kMostFeatures>* scratch, LanePlace place) {
  constexpr int kCount = TileScratch<kMostFeatures>::kRows / kAttendSimdgroups;
  MARLIN_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const HeadSums before = {totals.largest[i], totals.weights[i], 0.0f};
    const HeadSums added = {part_totals.largest[i], part_totals.weights[i], 0.0f};
    const HeadSums sums = AddSegment(before, added);
    const bool skipped = added.largest == NoScore() && added.weights == 0.0f;
    if (place.lane == 0) {
      const int row = place.simdgroup * kCount + i;
      scratch->factors[row] = skipped ? 1.0f : RescaleFactor(before.largest, sums.largest);
      scratch->largest[row] = skipped ? 0.0f : RescaleFactor(added.largest, sums.largest);
    }
    totals.largest[i] = sums.largest;
    totals.weights[i] = sums.weights;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  MARLIN_UNROLL
  for (int i = 0; i < TileScratch<kMostFeatures>::kRows / kSide; ++i) {
    const int row = i * kSide + FragmentRow(place.lane);
    const float old_factor = scratch->factors[row];
    const float new_factor = scratch->largest[row];
    MARLIN_UNROLL
    for (int f = 0; f < kColumns; ++f) {
      out.at[i][f] = FragmentOf(metal::fma(ElementsOf(part.at[i][f]), float2(new_factor),
                                           ElementsOf(out.at[i][f]) * old_factor));
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

/// Where a row goes, or its sums over a segment.
struct RowTarget {
  device float* sums;  ///< Null: the row is complete.
  bool none;           ///< The row does not see the segment.
};

static inline RowTarget TargetOf(AttendMemory memory, QueryTile tile, int row, int head,
                                 int segment, constant AttendParameters& p) {
  RowTarget target = {nullptr, false};
  if (p.segments == 1) return target;
  const KeyRange seen = KeysOfRow(tile, row, p);
  const int first = seen.first / kSegmentKeys;
  const int last = metal::max(seen.end - 1, seen.first) / kSegmentKeys;
  target.none = segment < first || segment > last;
  if (target.none || first == last) return target;
  const int index = tile.first_row + (tile.first + row) / p.group;
  target.sums = SumsOf(memory.sums, index, head, segment - first, p);
  return target;
}

/// Stores results, or the sums of `segment`.
template <int kMostFeatures, int kColumns>
static METAL_FUNC void StoreTile(
    thread OutFragments<TileScratch<kMostFeatures>::kRows / kSide, kColumns>& out,
    threadgroup TileScratch<kMostFeatures>* scratch, AttendMemory memory, QueryTile tile,
    int segment, LanePlace place, constant AttendParameters& p) {
  const int columns = ValueColumns(p);
  MARLIN_UNROLL
  for (int i = 0; i < TileScratch<kMostFeatures>::kRows / kSide; ++i) {
    const int row = i * kSide + FragmentRow(place.lane);
    const int at = tile.first + row;
    if (at >= tile.count) continue;
    const int head = tile.kv_head * p.group + at % p.group;
    const RowTarget target = TargetOf(memory, tile, row, head, segment, p);
    if (target.none) continue;
    MARLIN_UNROLL
    for (int f = 0; f < kColumns; ++f) {
      if (f >= columns) continue;
      const float2 elements = ElementsOf(out.at[i][f]);
      const int feature = ValueFeature(columns, f, place);
      MARLIN_UNROLL
      for (int j = 0; j < 2; ++j) {
        if (feature + j >= p.value_dim) continue;
        const HeadSums sums = {scratch->largest[row], scratch->weights[row], elements[j]};
        if (target.sums != nullptr) {
          StoreSums(target.sums, feature + j, sums);
        } else {
          StoreAttended(memory.out, tile.first_row + at / p.group, head, feature + j,
                        FinishHead(sums, head, memory.sinks, p), p);
        }
      }
    }
  }
}

template <int kMostFeatures>
static METAL_FUNC void AttendTile(threadgroup TileScratch<kMostFeatures>* scratch,
                                  AttendMemory memory, uint3 group, LanePlace place,
                                  constant AttendParameters& p) {
  constexpr int kRows = TileScratch<kMostFeatures>::kRows;
  constexpr int kRowFragments = kRows / kSide;
  constexpr int kColumns = kMostFeatures / (kAttendSimdgroups * kSide);
  constexpr int kCount = kRows / kAttendSimdgroups;
  const QueryTile tile = FindTile(memory, int(group.x), p.first_index + int(group.y), kRows, p);
  if (tile.sequence < 0) return;
  const KeyRange seen = {KeysOfRow(tile, 0, p).first, KeysOfRow(tile, kRows - 1, p).end};
  const int first_segment = seen.first / kSegmentKeys;
  const int last_segment = metal::max(seen.end - 1, seen.first) / kSegmentKeys;
  const int begin = first_segment + int(group.z);
  const int end = p.segments == 1 ? last_segment : begin;
  if (begin > last_segment) return;

  LoadTileQueries<kMostFeatures>(scratch, memory.queries, tile, place, p);
  KeepQueries(p);
  RowTotals<kCount> totals;
  OutFragments<kRowFragments, kColumns> out;
  ClearTile<kRowFragments, kColumns, kCount>(out, totals);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int segment = begin; segment <= end; ++segment) {
    RowTotals<kCount> part_totals;
    OutFragments<kRowFragments, kColumns> part;
    ClearTile<kRowFragments, kColumns, kCount>(part, part_totals);
    const KeyRange keys = {metal::max(seen.first, segment * kSegmentKeys),
                           metal::min(seen.end, (segment + 1) * kSegmentKeys)};
    AddTileSegment<kMostFeatures, kColumns>(part, part_totals, scratch, memory, tile, keys, place,
                                            p);
    FoldTile<kMostFeatures, kColumns>(out, totals, part, part_totals, scratch, place);
  }
  if (place.lane == 0) {
    MARLIN_UNROLL
    for (int i = 0; i < kCount; ++i) {
      scratch->largest[place.simdgroup * kCount + i] = totals.largest[i];
      scratch->weights[place.simdgroup * kCount + i] = totals.weights[i];
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  StoreTile<kMostFeatures, kColumns>(out, scratch, memory, tile, begin, place, p);
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_ATTEND_TILE_H_
